const Mods mods = {{C, {1}, {s0 + 1}}, {C, {1}, {s0 + 1}}};
const Sizes sizes = {s1, s1, 0, 0};
const RaggedOrder<$size, $of_keys> order(sizes, mods, s2, 1);
if (threadIdx.x == 0) *B = order.of_head;
for (int index = 0, n = 0; index < order.of_head * s2; ++index) {
  Place found;
  if (!order.find(index, mods, found)) continue;
  if (threadIdx.x == 0) {
    A[3 * n] = found.head;
    A[3 * n + 1] = found.batch;
    A[3 * n + 2] = found.tile;
  }
  n += 1;
}
