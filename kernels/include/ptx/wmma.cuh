#pragma once
// 16x16x16 tensor-core products of one warp: half in, float out. All 32 lanes call each function.
//
// Uses PTX directly because the pip wheels lack parts of mma.h. The assignment of elements to lanes
// is undocumented, so tiles are loaded and stored through memory only.
//
// Tiles start at multiples of 32 bytes; `stride` counts elements and is a multiple of 16 bytes.
// Addresses are generic: .shared addresses make the loads compile to ldmatrix, 10 % slower in v3.
#include <cuda_fp16.h>

struct MatrixA {
  unsigned r[8];
};

// The type of B records its layout, which selects the instruction of the product.
struct MatrixBRows {
  unsigned r[8];
};
struct MatrixBColumns {
  unsigned r[8];
};

// Zero-initialised by `Accumulator d{}`.
struct Accumulator {
  float r[8];
};

// Loads A[m][k] = tile[m * stride + k].  PTX: wmma.load.a.sync.aligned.row.m16n16k16.f16
__device__ __forceinline__ MatrixA load_a(const __half* tile, int stride) {
  MatrixA a;
  asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], %9;"
               : "=r"(a.r[0]), "=r"(a.r[1]), "=r"(a.r[2]), "=r"(a.r[3]), "=r"(a.r[4]), "=r"(a.r[5]),
                 "=r"(a.r[6]), "=r"(a.r[7])
               : "l"(tile), "r"(stride)
               : "memory");
  return a;
}

// Loads B[k][n] = tile[k * stride + n].  PTX: wmma.load.b.sync.aligned.row.m16n16k16.f16
__device__ __forceinline__ MatrixBRows load_b_rows(const __half* tile, int stride) {
  MatrixBRows b;
  asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], %9;"
               : "=r"(b.r[0]), "=r"(b.r[1]), "=r"(b.r[2]), "=r"(b.r[3]), "=r"(b.r[4]), "=r"(b.r[5]),
                 "=r"(b.r[6]), "=r"(b.r[7])
               : "l"(tile), "r"(stride)
               : "memory");
  return b;
}

// Loads B[k][n] = tile[n * stride + k]: a row-major tile, transposed.
// PTX: wmma.load.b.sync.aligned.col.m16n16k16.f16
__device__ __forceinline__ MatrixBColumns load_b_columns(const __half* tile, int stride) {
  MatrixBColumns b;
  asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], %9;"
               : "=r"(b.r[0]), "=r"(b.r[1]), "=r"(b.r[2]), "=r"(b.r[3]), "=r"(b.r[4]), "=r"(b.r[5]),
                 "=r"(b.r[6]), "=r"(b.r[7])
               : "l"(tile), "r"(stride)
               : "memory");
  return b;
}

// Computes D += A B.  PTX: wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32
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

// Computes D += A B.  PTX: wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32
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

// Stores D: tile[m * stride + n] = D[m][n].  PTX: wmma.store.d.sync.aligned.row.m16n16k16.f32
__device__ __forceinline__ void store(float* tile, int stride, const Accumulator& d) {
  asm volatile(
      "wmma.store.d.sync.aligned.row.m16n16k16.f32 [%0], {%1,%2,%3,%4,%5,%6,%7,%8}, %9;" ::"l"(
          tile),
      "f"(d.r[0]), "f"(d.r[1]), "f"(d.r[2]), "f"(d.r[3]), "f"(d.r[4]), "f"(d.r[5]), "f"(d.r[6]),
      "f"(d.r[7]), "r"(stride)
      : "memory");
}
