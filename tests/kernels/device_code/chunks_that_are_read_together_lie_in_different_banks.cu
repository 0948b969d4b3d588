for (int i = threadIdx.x; i < 16 * ${chunks}; i += 32) {
  int row = paired<${chunks}>(i / ${chunks});
  A[i] = row * ${chunks} + swizzled<${chunks}>(row, i % ${chunks});
}
