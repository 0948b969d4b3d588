#pragma once
// Tensor-core products of a warpgroup, four warps in a row of which the first is a multiple of
// four: D [64][n] += A [64][16] B [16][n], 16-bit numbers in, float out. All 128 threads begin each
// product together and go on; a product reads shared memory and writes D until it was waited for.
//
// Warp w owns rows 16 * w … 16 * w + 15. Lane l holds, with r = l / 4 and c = 2 * (l % 4),
//
//   D    d[4 * j], d[4 * j + 1] = D[r][8 * j + c, + 1]; d[4 * j + 2], d[4 * j + 3] of row r + 8
//   A    a[0] = A[r][c, c+1], a[1] = A[r+8][c, c+1], a[2] and a[3] the same 8 columns on
//
// So two columns of D, packed in pairs, are an A, as with the products of one warp.
//
// Of e4m3, which is 8 bits (e4m3.cuh), a product takes as many bytes: A [64][32] B [32][n].
//
//   A    a[0] = A[r][4 * (l % 4) … + 3], a[1] of row r + 8, a[2] and a[3] the same 16 columns on
// PTX: wgmma.mma_async, for sm_90a alone.
#include <ptx/mbarrier.cuh>
#include <ptx/e4m3.cuh>
#include <ptx/pack.cuh>

constexpr int wgmma_bytes = 32;  // of each row of A and B that one product takes

// A tile of boxes (tma.cuh) in shared memory, as the operand of a product.
struct Matrix {
  unsigned long long descriptor;
};

// The same `bytes` further on.
__device__ __forceinline__ Matrix operator+(Matrix matrix, int bytes) {
  return {matrix.descriptor + bytes / 16};
}

// What both kinds have: the swizzle of boxes, and 1024 bytes from eight rows to the next eight.
constexpr unsigned long long in_boxes = 1ull << 62 | 1024ull / 16 << 32;

// For A [64][16] as its own rows, and for B [16][n] as those of its transpose: sums go along rows.
// The next 16 columns (32 of e4m3) are 32 bytes on, up to the end of the box.
__device__ __forceinline__ Matrix by_rows(const void* box) {
  return {in_boxes | 1 << 16 | shared_address(box) / 16};
}

// For B [16][n] as its own rows, whose n columns are in boxes of so many rows: sums go across rows.
// The next 16 rows are 2048 bytes on.
__device__ __forceinline__ Matrix by_columns(const void* box, int rows) {
  return {in_boxes | (unsigned long long)(rows * 128 / 16) << 16 | shared_address(box) / 16};
}

// Before the first product, and before one that takes registers which were written since.
// wgmma.fence
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a group of products.  wgmma.commit_group
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Keeps the compiler from reading D before this place.
template <int count>
__device__ __forceinline__ void settle(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Waits until at most `pending` groups of products are still under way, and D may be read.
// wgmma.wait_group
template <int pending, int count>
__device__ __forceinline__ void wgmma_wait_group(float (&d)[count]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
  settle(d);
}

// The same where D goes on being written: what the other groups read may then be overwritten.
template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// The instruction for operands of type T and n columns; defined below for each.
template <class T, int n>
struct Product;

// D = A B, or D += A B if it is to be `added`; A and B by_rows.
template <class T, int count>
__device__ __forceinline__ void multiply(float (&d)[count], Matrix a, Matrix b, bool added) {
  Product<T, 2 * count>::multiply(d, a, b, added);
}

// The same with B by_columns.
template <class T, int count>
__device__ __forceinline__ void multiply_columns(float (&d)[count], Matrix a, Matrix b,
                                                 bool added) {
  Product<T, 2 * count>::multiply_columns(d, a, b, added);
}

// The same with A in registers and B by_columns, or of e4m3 by_rows.
template <class T, int count>
__device__ __forceinline__ void multiply(float (&d)[count], const unsigned (&a)[4], Matrix b,
                                         bool added) {
  Product<T, 2 * count>::multiply(d, a, b, added);
}

// The registers of D, as text and as operands. An instruction names them all.
#define TEXT(i, j, k, l) "%" #i ",%" #j ",%" #k ",%" #l
#define AND_TEXT(i, j, k, l) "," TEXT(i, j, k, l)
#define OPERANDS(i, j, k, l) "+f"(d[i]), "+f"(d[j]), "+f"(d[k]), "+f"(d[l])
#define AND_OPERANDS(i, j, k, l) , OPERANDS(i, j, k, l)
#define D_16(FIRST, NEXT) FIRST(0, 1, 2, 3) NEXT(4, 5, 6, 7)
#define D_32(FIRST, NEXT) D_16(FIRST, NEXT) NEXT(8, 9, 10, 11) NEXT(12, 13, 14, 15)
#define D_48(FIRST, NEXT) D_32(FIRST, NEXT) NEXT(16, 17, 18, 19) NEXT(20, 21, 22, 23)
#define D_64(FIRST, NEXT) D_48(FIRST, NEXT) NEXT(24, 25, 26, 27) NEXT(28, 29, 30, 31)
#define D_80(FIRST, NEXT) D_64(FIRST, NEXT) NEXT(32, 33, 34, 35) NEXT(36, 37, 38, 39)
#define D_96(FIRST, NEXT) D_80(FIRST, NEXT) NEXT(40, 41, 42, 43) NEXT(44, 45, 46, 47)
#define D_112(FIRST, NEXT) D_96(FIRST, NEXT) NEXT(48, 49, 50, 51) NEXT(52, 53, 54, 55)
#define D_128(FIRST, NEXT) D_112(FIRST, NEXT) NEXT(56, 57, 58, 59) NEXT(60, 61, 62, 63)
#define D_144(FIRST, NEXT) D_128(FIRST, NEXT) NEXT(64, 65, 66, 67) NEXT(68, 69, 70, 71)
#define D_160(FIRST, NEXT) D_144(FIRST, NEXT) NEXT(72, 73, 74, 75) NEXT(76, 77, 78, 79)
#define D_176(FIRST, NEXT) D_160(FIRST, NEXT) NEXT(80, 81, 82, 83) NEXT(84, 85, 86, 87)
#define D_192(FIRST, NEXT) D_176(FIRST, NEXT) NEXT(88, 89, 90, 91) NEXT(92, 93, 94, 95)
#define D_208(FIRST, NEXT) D_192(FIRST, NEXT) NEXT(96, 97, 98, 99) NEXT(100, 101, 102, 103)
#define D_224(FIRST, NEXT) D_208(FIRST, NEXT) NEXT(104, 105, 106, 107) NEXT(108, 109, 110, 111)
#define D_240(FIRST, NEXT) D_224(FIRST, NEXT) NEXT(112, 113, 114, 115) NEXT(116, 117, 118, 119)
#define D_256(FIRST, NEXT) D_240(FIRST, NEXT) NEXT(120, 121, 122, 123) NEXT(124, 125, 126, 127)

// The two instructions for n columns: operand `i` is the first after D. Their last inputs are
// whether to add, the signs of A and B, and which of those in shared memory are by columns; of e4m3
// none can be.
#define WGMMA(n, depth_and_types, inputs, added, ...)                     \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #added                   \
               ", 0;\n"                                                   \
               "wgmma.mma_async.sync.aligned.m64n" #n "k" depth_and_types \
               " {" D_##n(TEXT, AND_TEXT) "}, " inputs ";}"               \
               : D_##n(OPERANDS, AND_OPERANDS)                            \
               : __VA_ARGS__)
#define WGMMA_SHARED(n, types, columns, i, j, k)                                            \
  WGMMA(n, types, "%" #i ",%" #j ",p,1,1" columns, k, "l"(a.descriptor), "l"(b.descriptor), \
        "r"(added))
#define WGMMA_REGISTERS(n, types, columns, i, j, k, l, m, o)                               \
  WGMMA(n, types, "{%" #i ",%" #j ",%" #k ",%" #l "},%" #m ",p,1,1" columns, o, "r"(a[0]), \
        "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "r"(added))
#define PRODUCT(n, i, j, k, l, m, o)                                                               \
  template <class T>                                                                               \
  struct Product<T, n> {                                                                           \
    static __device__ __forceinline__ void multiply(float (&d)[n / 2], Matrix a, Matrix b,         \
                                                    int added) {                                   \
      if constexpr (is_e4m3<T>)                                                                    \
        WGMMA_SHARED(n, "32.f32.e4m3.e4m3", "", i, j, k);                                          \
      else if constexpr (is_half<T>)                                                               \
        WGMMA_SHARED(n, "16.f32.f16.f16", ",0,0", i, j, k);                                        \
      else                                                                                         \
        WGMMA_SHARED(n, "16.f32.bf16.bf16", ",0,0", i, j, k);                                      \
    }                                                                                              \
    static __device__ __forceinline__ void multiply_columns(float (&d)[n / 2], Matrix a, Matrix b, \
                                                            int added) {                           \
      if constexpr (is_half<T>)                                                                    \
        WGMMA_SHARED(n, "16.f32.f16.f16", ",0,1", i, j, k);                                        \
      else                                                                                         \
        WGMMA_SHARED(n, "16.f32.bf16.bf16", ",0,1", i, j, k);                                      \
    }                                                                                              \
    static __device__ __forceinline__ void multiply(float (&d)[n / 2], const unsigned (&a)[4],     \
                                                    Matrix b, int added) {                         \
      if constexpr (is_e4m3<T>)                                                                    \
        WGMMA_REGISTERS(n, "32.f32.e4m3.e4m3", "", i, j, k, l, m, o);                              \
      else if constexpr (is_half<T>)                                                               \
        WGMMA_REGISTERS(n, "16.f32.f16.f16", ",1", i, j, k, l, m, o);                              \
      else                                                                                         \
        WGMMA_REGISTERS(n, "16.f32.bf16.bf16", ",1", i, j, k, l, m, o);                            \
    }                                                                                              \
  };
PRODUCT(16, 8, 9, 10, 11, 12, 13)
PRODUCT(32, 16, 17, 18, 19, 20, 21)
PRODUCT(48, 24, 25, 26, 27, 28, 29)
PRODUCT(64, 32, 33, 34, 35, 36, 37)
PRODUCT(80, 40, 41, 42, 43, 44, 45)
PRODUCT(96, 48, 49, 50, 51, 52, 53)
PRODUCT(112, 56, 57, 58, 59, 60, 61)
PRODUCT(128, 64, 65, 66, 67, 68, 69)
PRODUCT(144, 72, 73, 74, 75, 76, 77)
PRODUCT(160, 80, 81, 82, 83, 84, 85)
PRODUCT(176, 88, 89, 90, 91, 92, 93)
PRODUCT(192, 96, 97, 98, 99, 100, 101)
PRODUCT(208, 104, 105, 106, 107, 108, 109)
PRODUCT(224, 112, 113, 114, 115, 116, 117)
PRODUCT(240, 120, 121, 122, 123, 124, 125)
PRODUCT(256, 128, 129, 130, 131, 132, 133)

#undef PRODUCT
#undef WGMMA_REGISTERS
#undef WGMMA_SHARED
#undef WGMMA
#undef AND_OPERANDS
#undef OPERANDS
#undef AND_TEXT
#undef TEXT
