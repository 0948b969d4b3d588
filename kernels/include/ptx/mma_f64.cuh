#pragma once
// Tensor-core products of one warp on doubles, 16x8x16. All 32 lanes call this together. With r = l
// / 4 and c = l % 4, lane l holds:
//
//   A [16][16]  a[2 * i], a[2 * i + 1] = A[r, r+8][c + 4 * i]
//   B [16][8]   b[i] = B[c + 4 * i][r]
//   D [16][8]   d[0], d[1] = D[r][2 * c, 2 * c + 1]; d[2], d[3] = the same columns of D[r+8]

// Computes D += A B.  PTX: mma.sync.aligned.m16n8k16.row.col.f64 from sm_90 on, else eight m8n8k4
__device__ __forceinline__ void multiply_add_f64(double (&d)[4], const double (&a)[8],
                                                 const double (&b)[4]) {
  if constexpr (__CUDA_ARCH__ >= 900) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, {%0,%1,%2,%3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
          "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                   : "+d"(d[i % 2 * 2]), "+d"(d[i % 2 * 2 + 1])
                   : "d"(a[i]), "d"(b[i / 2]));
  }
}
