#pragma once
// Tensor-core products of one warp: 16-bit inputs, float accumulators. All 32 lanes call each
// function together. With r = l / 4 and c = 2 * (l % 4), lane l holds:
//
//   A [16][16]  a[0] = A[r][c, c+1], a[1] = A[r+8][c, c+1], a[2], a[3] = columns + 8
//   B [16][8]   b0 = B[c, c+1][r], b1 = B[c+8, c+9][r]
//   D [16][8]   d[0], d[1] = D[r][c, c+1]; d[2], d[3] = D[r+8][c, c+1]
//
// Two neighbouring D fragments, packed in pairs, form an A fragment: P stays in registers.
#include <ptx/pack.cuh>

// A shared-memory address that supports arithmetic.
struct SharedAddress {
  unsigned bytes;
  __device__ __forceinline__ SharedAddress(const void* shared)
      : bytes(unsigned(__cvta_generic_to_shared(shared))) {}
};

// Loads four 8x8 matrices of 16-bit numbers. Lane l passes the address of row l % 8 of matrix l /
// 8, a multiple of 16 bytes, and receives elements 2 * (l % 4) and 2 * (l % 4) + 1 of row l / 4 of
// each matrix. (As floats the matrices are 8x4, and the lane receives element l % 4 of row l / 4.)
// PTX: ldmatrix.sync.aligned.m8n8.x4.shared.b16
__device__ __forceinline__ void ldmatrix(unsigned (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.bytes)
               : "memory");
}

// Loads four transposed matrices.  PTX: ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
__device__ __forceinline__ void ldmatrix_trans(unsigned (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.bytes)
               : "memory");
}

// Computes D += A B.  PTX: mma.sync.aligned.m16n8k16.row.col.f32; two m16n8k8 on sm_75
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
  if constexpr (__CUDA_ARCH__ < 800) {
    const auto add_half = [&](unsigned a0, unsigned a1, unsigned b) {
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
          "{%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a0), "r"(a1), "r"(b));
    };
    add_half(a[0], a[1], b0);
    add_half(a[2], a[3], b1);
  } else if constexpr (is_half<T>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
