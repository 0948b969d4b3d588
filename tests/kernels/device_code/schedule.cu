const Sizes sizes = {s0, s0, 0, 0};
StaticSchedule<$Br, $Bc, true, false, $may_skip> tasks(sizes, Mods(), s1, 1, {});
for (int i = blockIdx.x * s2; tasks.advance(); ++i) {
  const RowTile task = tasks.task();
  A[i] = task.head;
  B[i] = task.row;
  C[i] = task.kv_end;
}
