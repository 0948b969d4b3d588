#pragma once
// Tensor-core products of one warp on tf32: floats whose last 13 bits are ignored. A product is
// 16x8x8; D has the layout of mma.cuh. With r = l / 4 and c = l % 4, lane l holds:
//
//   A [16][8]   a[0] = A[r][c], a[1] = A[r+8][c], a[2], a[3] = column c + 4
//   B [8][8]    b0 = B[c][r], b1 = B[c+4][r]

// Rounds x to tf32, to nearest, ties away from zero. Products would truncate instead, which doubles
// the error and biases it towards zero.  PTX: cvt.rna.tf32.f32
__device__ __forceinline__ unsigned round_to_tf32(float x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

// Computes D += A B.  PTX: mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32, from sm_80 on
__device__ __forceinline__ void multiply_add_tf32(float (&d)[4], const unsigned (&a)[4],
                                                  unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
