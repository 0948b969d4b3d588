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
// Two neighbouring column blocks of D, packed in pairs, form an A operand, as with mma.cuh.
//
// With e4m3 a product covers twice the depth, A [64][32] B [32][n]:
//
//   A    a[0] = A[r][4 * (l % 4) … + 3], a[1] = row r + 8; a[2], a[3] = columns + 16
//
// The simulator computes a product in the first wait for its group; until then D is NaN. It differs
// from a device in three points:
//
// - It reads A from registers when the product is issued, so these may be overwritten at once.
// - It rounds the sum after each of the 16 terms, where a device adds the terms first. Sums of e4m3
//   keep 14 bits, as on an H100.
// - It detects a missing wgmma_fence only for registers that were written after a wait.
#include <ptx/mbarrier.cuh>
#include <ptx/pack.cuh>

constexpr int wgmma_bytes = 32;  // bytes of each row of A and B that one product reads

// A wgmma operand: a tile of boxes (tma.cuh) in shared memory.
struct Matrix {
  const unsigned char* address;
  int rows;  // rows per box for by_columns, 0 for by_rows
};

// Returns the operand that starts `bytes` bytes further on.
inline Matrix operator+(Matrix matrix, int bytes) {
  return {matrix.address + bytes, matrix.rows};
}

// Returns a K-major operand: A [64][16] stored by rows, or B [16][n] stored as its transpose. The
// next 16 columns (32 of e4m3) follow 32 bytes further in the same box.
inline Matrix by_rows(const void* box) {
  return {static_cast<const unsigned char*>(box), 0};
}

// Returns an N-major operand: B [16][n] stored by rows, with n columns in boxes of `rows` rows. The
// next 16 rows follow 2048 bytes further.
inline Matrix by_columns(const void* box, int rows) {
  return {static_cast<const unsigned char*>(box), rows};
}

// Must precede the first product, and every product whose registers were written after the last
// wgmma_fence.
inline void wgmma_fence(simulator::Here here = {}) {
  timeline::event(timeline::issue);
  simulator_fence_registers(here.file, here.line);
}

// Commits the issued products as a group.
inline void wgmma_commit_group(simulator::Here here = {}) {
  simulator_commit_products(here.file, here.line);
  timeline::end(timeline::issue);
}

// Keeps the compiler from reading D before this point.
template <int count>
inline void read_after_here(float (&)[count]) {}

// Waits until at most `pending` groups of products are in flight; D may then be read.
template <int pending, int count>
inline void wgmma_wait_group(float (&d)[count], simulator::Here here = {}) {
  static_assert(pending >= 0, "a number of groups");
  const timeline::Phase waiting(timeline::product_wait, pending);
  simulator_wait_for_products(pending, d, here.file, here.line);
}

namespace simulator {

// Returns the value of T in the runtime's enum Format.
template <class T>
constexpr int format = sizeof(T) == 1 ? 2 : is_half<T>;

template <int n>
constexpr void check_columns() {
  static_assert(n % 16 == 0 && n >= 16 && n <= 256, "n is a multiple of 16, up to 256");
}

}  // namespace simulator

// Computes D = A B, or D += A B if `added`; A and B are by_rows.
template <class T, int count>
inline void multiply(float (&d)[count], Matrix a, Matrix b, bool added, simulator::Here here = {}) {
  simulator::check_columns<2 * count>();
  if (a.rows != 0 || b.rows != 0) simulator::fault("multiplies A or B by_columns", here);
  simulator_multiply(d, nullptr, a.address, b.address, 0, 2 * count, simulator::format<T>, added,
                     here.file, here.line);
}

// Computes D = A B, or D += A B if `added`; A is in registers, B by_columns (by_rows for e4m3).
template <class T, int count>
inline void multiply(float (&d)[count], const unsigned (&a)[4], Matrix b, bool added,
                     simulator::Here here = {}) {
  simulator::check_columns<2 * count>();
  if (sizeof(T) == 1 && b.rows != 0) simulator::fault("multiplies B of e4m3 by_columns", here);
  if (sizeof(T) == 2 && b.rows == 0)
    simulator::fault("multiplies A in registers with B by_rows", here);
  simulator_multiply(d, a, nullptr, b.address, b.rows, 2 * count, simulator::format<T>, added,
                     here.file, here.line);
}
