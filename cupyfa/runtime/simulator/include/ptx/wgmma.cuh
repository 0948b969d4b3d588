#pragma once
// Tensor-core products of a warpgroup, four warps in a row of which the first is a multiple of
// four: D [64][n] += A [64][16] B [16][n], 16-bit numbers in, float out. All 128 threads begin each
// product together and go on; a product reads shared memory and writes D until it was waited for.
//
// Warp w owns rows 16 * w … 16 * w + 15. Lane l holds, with r = l / 4 and c = 2 * (l % 4),
//
//   D    d[4 * j], d[4 * j + 1] = D[r][8 * j + c, + 1]; d[4 * j + 2], d[4 * j + 3] of row r + 8
//   A    a[0] = A[r][c, c+1], a[1] = A[r+8][c, c+1], a[2] and a[3] the same, columns + 8
//
// So two columns of D, packed in pairs, are an A, as with the products of one warp.
//
// With e4m3, numbers of 8 bits (e4m3.cuh), a product takes the same number of bytes: A [64][32] B
// [32][n].
//
//   A    a[0] = A[r][4 * (l % 4) … + 3], a[1] of row r + 8, a[2] and a[3] the same 16 columns on
//
// A product is made in the first wait for its group; until then D is NaN. Not as on a device:
//
// - A in registers is read when the product begins, so its registers may be written at once.
// - Sums are rounded after each of the 16 products; a device adds these together first. Those of
//   e4m3 have the 14 bits that an H100 keeps.
// - Of the registers written without wgmma_fence, only those written after a wait are noticed.
#include <ptx/mbarrier.cuh>
#include <ptx/pack.cuh>

constexpr int wgmma_bytes = 32;  // of each row of A and B that one product takes

// A tile of boxes (tma.cuh) in shared memory, as the operand of a product.
struct Matrix {
  const unsigned char* address;
  int rows;  // of its boxes, if it is by columns
};

// Returns the operand that begins `bytes` bytes further on.
inline Matrix operator+(Matrix matrix, int bytes) {
  return {matrix.address + bytes, matrix.rows};
}

// For A [64][16] as its own rows, and for B [16][n] as those of its transpose: sums go along rows.
// The next 16 columns (32 of e4m3) are 32 bytes further, up to the end of the box.
inline Matrix by_rows(const void* box) {
  return {static_cast<const unsigned char*>(box), 0};
}

// For B [16][n] as its own rows, whose n columns are in boxes of `rows` rows: sums go across rows.
// The next 16 rows are 2048 bytes further.
inline Matrix by_columns(const void* box, int rows) {
  return {static_cast<const unsigned char*>(box), rows};
}

// Comes before the first product, and before a product that uses registers written since.
inline void wgmma_fence(simulator::Here here = {}) {
  timeline::event(timeline::issue);
  simulator_fence_registers(here.file, here.line);
}

// Ends a group of products.
inline void wgmma_commit_group(simulator::Here here = {}) {
  simulator_commit_products(here.file, here.line);
  timeline::end(timeline::issue);
}

// Keeps the compiler from reading D before this point.
template <int count>
inline void read_after_here(float (&)[count]) {}

// Waits until at most `pending` groups of products are in flight; D may be read then.
template <int pending, int count>
inline void wgmma_wait_group(float (&d)[count], simulator::Here here = {}) {
  static_assert(pending >= 0, "a number of groups");
  const timeline::Phase waiting(timeline::product_wait, pending);
  simulator_wait_for_products(pending, d, here.file, here.line);
}

// Waits like the above, without reading D: operands of completed groups may be overwritten.
template <int pending>
inline void wgmma_wait_group(simulator::Here here = {}) {
  static_assert(pending >= 0, "a number of groups");
  const timeline::Phase waiting(timeline::product_wait, pending);
  simulator_wait_for_products(pending, nullptr, here.file, here.line);
}

namespace simulator {

// The runtime's Format.
template <class T>
constexpr int format = sizeof(T) == 1 ? 2 : is_half<T>;

template <int n>
constexpr void check_columns() {
  static_assert(n % 16 == 0 && n >= 16 && n <= 256, "n is a multiple of 16, up to 256");
}

}  // namespace simulator

// Computes D = A B, or D += A B if `added`; A and B by_rows.
template <class T, int count>
inline void multiply(float (&d)[count], Matrix a, Matrix b, bool added, simulator::Here here = {}) {
  simulator::check_columns<2 * count>();
  timeline::event(timeline::worked_wgmma, 0, 2 * count);
  if (a.rows != 0 || b.rows != 0) simulator::fault("multiplies A or B by_columns", here);
  simulator_multiply(d, nullptr, a.address, b.address, 0, 2 * count, simulator::format<T>, added,
                     here.file, here.line);
}

// Multiplies likewise with A in registers and B by_columns, or by_rows for e4m3.
template <class T, int count>
inline void multiply(float (&d)[count], const unsigned (&a)[4], Matrix b, bool added,
                     simulator::Here here = {}) {
  simulator::check_columns<2 * count>();
  timeline::event(timeline::worked_wgmma, 0, 2 * count);
  if (sizeof(T) == 1 && b.rows != 0) simulator::fault("multiplies B of e4m3 by_columns", here);
  if (sizeof(T) == 2 && b.rows == 0)
    simulator::fault("multiplies A in registers with B by_rows", here);
  simulator_multiply(d, a, nullptr, b.address, b.rows, 2 * count, simulator::format<T>, added,
                     here.file, here.line);
}
