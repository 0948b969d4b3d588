#pragma once
// 16x16x16 tensor-core tiles of one warp: half in, float out. All 32 lanes call each function.
//
// The instructions themselves, because the pip wheels lack parts of mma.h. Which lane holds which
// element is not documented: tiles go in and out through memory only.
// Tiles begin at multiples of 32 bytes; `stride` counts elements and is a multiple of 16 bytes.
// Addresses are generic: loads qualified as .shared became ldmatrix and made v3 a tenth slower.
#include <cuda_fp16.h>

struct MatrixA {
  unsigned r[8];
};

// The product depends on how B was loaded.
struct MatrixBRows {
  unsigned r[8];
};
struct MatrixBColumns {
  unsigned r[8];
};

// Starts at zero when written `Accumulator d{}`.
struct Accumulator {
  float r[8];
};

// A[m][k] = tile[m * stride + k].  wmma.load.a.sync.aligned.row.m16n16k16.f16
__device__ __forceinline__ MatrixA load_a(const __half* tile, int stride) {
  MatrixA a;
  asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], %9;"
               : "=r"(a.r[0]), "=r"(a.r[1]), "=r"(a.r[2]), "=r"(a.r[3]), "=r"(a.r[4]), "=r"(a.r[5]),
                 "=r"(a.r[6]), "=r"(a.r[7])
               : "l"(tile), "r"(stride)
               : "memory");
  return a;
}

// B[k][n] = tile[k * stride + n].  wmma.load.b.sync.aligned.row.m16n16k16.f16
__device__ __forceinline__ MatrixBRows load_b_rows(const __half* tile, int stride) {
  MatrixBRows b;
  asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], %9;"
               : "=r"(b.r[0]), "=r"(b.r[1]), "=r"(b.r[2]), "=r"(b.r[3]), "=r"(b.r[4]), "=r"(b.r[5]),
                 "=r"(b.r[6]), "=r"(b.r[7])
               : "l"(tile), "r"(stride)
               : "memory");
  return b;
}

// B[k][n] = tile[n * stride + k]: a row-major tile, transposed.
// wmma.load.b.sync.aligned.col.m16n16k16.f16
__device__ __forceinline__ MatrixBColumns load_b_columns(const __half* tile, int stride) {
  MatrixBColumns b;
  asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], %9;"
               : "=r"(b.r[0]), "=r"(b.r[1]), "=r"(b.r[2]), "=r"(b.r[3]), "=r"(b.r[4]), "=r"(b.r[5]),
                 "=r"(b.r[6]), "=r"(b.r[7])
               : "l"(tile), "r"(stride)
               : "memory");
  return b;
}

// D += A B.  wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32
__device__ __forceinline__ void multiply_add(Accumulator& d, const MatrixA& a,
                                             const MatrixBRows& b) {
  asm volatile(
      "wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, "
      "{%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19,%20,%21,%22,%23}, "
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(d.r[0]), "+f"(d.r[1]), "+f"(d.r[2]), "+f"(d.r[3]), "+f"(d.r[4]), "+f"(d.r[5]),
        "+f"(d.r[6]), "+f"(d.r[7])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(a.r[4]), "r"(a.r[5]), "r"(a.r[6]),
        "r"(a.r[7]), "r"(b.r[0]), "r"(b.r[1]), "r"(b.r[2]), "r"(b.r[3]), "r"(b.r[4]), "r"(b.r[5]),
        "r"(b.r[6]), "r"(b.r[7]));
}

// D += A B.  wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32
__device__ __forceinline__ void multiply_add(Accumulator& d, const MatrixA& a,
                                             const MatrixBColumns& b) {
  asm volatile(
      "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, "
      "{%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19,%20,%21,%22,%23}, "
      "{%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(d.r[0]), "+f"(d.r[1]), "+f"(d.r[2]), "+f"(d.r[3]), "+f"(d.r[4]), "+f"(d.r[5]),
        "+f"(d.r[6]), "+f"(d.r[7])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(a.r[4]), "r"(a.r[5]), "r"(a.r[6]),
        "r"(a.r[7]), "r"(b.r[0]), "r"(b.r[1]), "r"(b.r[2]), "r"(b.r[3]), "r"(b.r[4]), "r"(b.r[5]),
        "r"(b.r[6]), "r"(b.r[7]));
}

// tile[m * stride + n] = D[m][n].  wmma.store.d.sync.aligned.row.m16n16k16.f32
__device__ __forceinline__ void store(float* tile, int stride, const Accumulator& d) {
  asm volatile(
      "wmma.store.d.sync.aligned.row.m16n16k16.f32 [%0], {%1,%2,%3,%4,%5,%6,%7,%8}, %9;" ::"l"(
          tile),
      "f"(d.r[0]), "f"(d.r[1]), "f"(d.r[2]), "f"(d.r[3]), "f"(d.r[4]), "f"(d.r[5]), "f"(d.r[6]),
      "f"(d.r[7]), "r"(stride)
      : "memory");
}
