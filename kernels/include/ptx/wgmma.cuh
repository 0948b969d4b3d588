#pragma once
// Tensor-core products of a warpgroup (four warps, the first at a multiple of 4): D [64][n] += A
// [64][16] B [16][n], 16-bit inputs, float accumulators. All 128 threads issue each product
// together and continue. Until the wait for it, the product reads shared memory and writes D.
//
// Warp w owns rows 16 * w … 16 * w + 15. Lane l holds, with r = l / 4 and c = 2 * (l % 4),
//
//   D    d[4 * j], d[4 * j + 1] = D[r][8 * j + c, + 1]; d[4 * j + 2], d[4 * j + 3] = row r + 8
//   A    a[0] = A[r][c, c+1], a[1] = A[r+8][c, c+1], a[2], a[3] = columns + 8
//
// Two neighbouring column blocks of D, packed in pairs, form an A operand, as for the products of
// one warp. With e4m3 a product covers twice the depth, A [64][32] B [32][n], and a[0] is A[r][4 *
// (l % 4) … + 3].  PTX: wgmma.mma_async, sm_90a only
#include <ptx/mbarrier.cuh>
#include <ptx/pack.cuh>

constexpr int wgmma_bytes = 32;  // bytes of each row of A and B that one product reads

// A wgmma operand: a tile of boxes (tma.cuh) in shared memory.
struct Matrix {
  unsigned long long descriptor;

  // Builds a descriptor. The lower word holds address / 16 and, from bit 16, leading offset / 16.
  // The upper word is constant: stride 1024 / 16 between groups of eight rows, bit 30 for 128-byte
  // swizzle.
  static __device__ __forceinline__ Matrix of(unsigned low) {
    Matrix matrix;
    asm("mov.b64 %0, {%1, 0x40000040};" : "=l"(matrix.descriptor) : "r"(low));
    return matrix;
  }
};

// Returns the operand that starts `bytes` bytes further on.
__device__ __forceinline__ Matrix operator+(Matrix matrix, int bytes) {
  return {matrix.descriptor + bytes / 16};
}

// Returns a K-major operand: A [64][16] stored by rows, or B [16][n] stored as its transpose. The
// next 16 columns (32 of e4m3) are 32 bytes further in the same box; the leading offset is unused.
__device__ __forceinline__ Matrix by_rows(const void* box) {
  return Matrix::of(1 << 16 | shared_address(box) / 16);
}

// Returns an N-major operand: B [16][n] stored by rows, with n columns in boxes of `rows` rows. The
// next 16 rows follow 2048 bytes further; the leading offset leads to the next box.
__device__ __forceinline__ Matrix by_columns(const void* box, int rows) {
  return Matrix::of(unsigned(rows * 128 / 16) << 16 | shared_address(box) / 16);
}

// Must precede the first product, and any product whose registers were written since.
// PTX: wgmma.fence
__device__ __forceinline__ void wgmma_fence() {
  timeline::event(timeline::issue);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Commits the issued products as a group.  PTX: wgmma.commit_group
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  timeline::end(timeline::issue);
}

// Keeps the compiler from reading D before this point.
template <int count>
__device__ __forceinline__ void read_after_here(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Waits until at most `pending` groups of products are in flight; D may then be read.
// PTX: wgmma.wait_group
template <int pending, int count>
__device__ __forceinline__ void wgmma_wait_group(float (&d)[count]) {
  const timeline::Phase waiting(timeline::product_wait, pending);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
  read_after_here(d);
}

// Lists the registers of D as strings and as asm operands. Operands 0 to 6 are A and B, the
// accumulate flag and A in registers, all "+" operands so that they are numbered before D.
#define WGMMA_TEXT(i, j, k, l) "%" #i ",%" #j ",%" #k ",%" #l
#define WGMMA_AND_TEXT(i, j, k, l) "," WGMMA_TEXT(i, j, k, l)
#define WGMMA_D(i, j, k, l) "+f"(d[i - 7]), "+f"(d[j - 7]), "+f"(d[k - 7]), "+f"(d[l - 7])
#define WGMMA_AND_D(i, j, k, l) , WGMMA_D(i, j, k, l)
#define WGMMA_16(X, Y) X(7, 8, 9, 10) Y(11, 12, 13, 14)
#define WGMMA_32(X, Y) WGMMA_16(X, Y) Y(15, 16, 17, 18) Y(19, 20, 21, 22)
#define WGMMA_48(X, Y) WGMMA_32(X, Y) Y(23, 24, 25, 26) Y(27, 28, 29, 30)
#define WGMMA_64(X, Y) WGMMA_48(X, Y) Y(31, 32, 33, 34) Y(35, 36, 37, 38)
#define WGMMA_80(X, Y) WGMMA_64(X, Y) Y(39, 40, 41, 42) Y(43, 44, 45, 46)
#define WGMMA_96(X, Y) WGMMA_80(X, Y) Y(47, 48, 49, 50) Y(51, 52, 53, 54)
#define WGMMA_112(X, Y) WGMMA_96(X, Y) Y(55, 56, 57, 58) Y(59, 60, 61, 62)
#define WGMMA_128(X, Y) WGMMA_112(X, Y) Y(63, 64, 65, 66) Y(67, 68, 69, 70)
#define WGMMA_144(X, Y) WGMMA_128(X, Y) Y(71, 72, 73, 74) Y(75, 76, 77, 78)
#define WGMMA_160(X, Y) WGMMA_144(X, Y) Y(79, 80, 81, 82) Y(83, 84, 85, 86)
#define WGMMA_176(X, Y) WGMMA_160(X, Y) Y(87, 88, 89, 90) Y(91, 92, 93, 94)
#define WGMMA_192(X, Y) WGMMA_176(X, Y) Y(95, 96, 97, 98) Y(99, 100, 101, 102)
#define WGMMA_208(X, Y) WGMMA_192(X, Y) Y(103, 104, 105, 106) Y(107, 108, 109, 110)
#define WGMMA_224(X, Y) WGMMA_208(X, Y) Y(111, 112, 113, 114) Y(115, 116, 117, 118)
#define WGMMA_240(X, Y) WGMMA_224(X, Y) Y(119, 120, 121, 122) Y(123, 124, 125, 126)
#define WGMMA_256(X, Y) WGMMA_240(X, Y) Y(127, 128, 129, 130) Y(131, 132, 133, 134)

// The last inputs of the instruction are the signs of A and B, and whether each shared-memory
// operand is stored by columns; e4m3 lacks the latter option.
#define WGMMA(n, depth_and_types, A, columns)                                                    \
  asm volatile(                                                                                  \
      "{.reg .pred p; setp.ne.b32 p, %2, 0;\n"                                                   \
      "wgmma.mma_async.sync.aligned.m64n" #n "k" depth_and_types                                 \
      " {" WGMMA_##n(WGMMA_TEXT, WGMMA_AND_TEXT) "}, " A ",%1,p,1,1" columns ";}"                \
      : "+l"(a.descriptor), "+l"(b.descriptor), "+r"(added), "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), \
        "+r"(r[3]), WGMMA_##n(WGMMA_D, WGMMA_AND_D))
#define WGMMA_OF_TYPE(n, A, columns)        \
  if constexpr (sizeof(T) == 1)             \
    WGMMA(n, "32.f32.e4m3.e4m3", A, "");    \
  else if constexpr (is_half<T>)            \
    WGMMA(n, "16.f32.f16.f16", A, columns); \
  else                                      \
    WGMMA(n, "16.f32.bf16.bf16", A, columns)

// Computes D [64][n] = A B, or D += A B if `added`, for each n. Either A and B are by_rows, or A is
// in registers and B by_columns (by_rows for e4m3).
#define WGMMA_PRODUCTS(n)                                                                       \
  template <class T>                                                                            \
  __device__ __forceinline__ void multiply(float (&d)[n / 2], Matrix a, Matrix b, int added) {  \
    unsigned r[4] = {};                                                                         \
    WGMMA_OF_TYPE(n, "%0", ",0,0");                                                             \
  }                                                                                             \
  template <class T>                                                                            \
  __device__ __forceinline__ void multiply(float (&d)[n / 2], const unsigned (&A)[4], Matrix b, \
                                           int added) {                                         \
    Matrix a = {};                                                                              \
    unsigned r[4] = {A[0], A[1], A[2], A[3]};                                                   \
    WGMMA_OF_TYPE(n, "{%3,%4,%5,%6}", ",1");                                                    \
  }
#define WGMMA_EACH(X) \
  X(16)               \
  X(32)               \
  X(48) X(64) X(80) X(96) X(112) X(128) X(144) X(160) X(176) X(192) X(208) X(224) X(240) X(256)
WGMMA_EACH(WGMMA_PRODUCTS)
