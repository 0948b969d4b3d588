#pragma once
// Products of the backward pass on tensor cores, of 16-bit tiles in shared memory, and P and dS
// between them, in the fragments of mma.cuh.

#include <attention/row_state.cuh>
#include <backward/parts/repair_gradients.cuh>
#include <ptx/mma.cuh>
#include <ptx/opaque.cuh>
#include <tile/async_copy.cuh>
#include <tile/block_copy.cuh>
#include <tile/store.cuh>
#include <tile/warp.cuh>

static_assert(sizeof(operand) == 2, "these tensor-core products take 16-bit numbers");

// The thread's lane, from which the compiler precomputes nothing.
__device__ __forceinline__ int own_lane() {
  return opaque(int(threadIdx.x)) % warp_size;
}

// How many parts the warps make of the rows of a product; its columns are divided among the warps
// of a part. The smaller a part's edges, the less of shared memory is read.
__host__ __device__ constexpr int parts_of_rows(int height, int columns, int warps) {
  int best = 1, least = 1 << 30;
  for (int parts = 1; parts <= warps; parts *= 2) {
    if (warps % parts != 0 || height % (parts * step) != 0) continue;
    const int size = height / parts + cdiv(columns, warps / parts * step) * step;
    if (size <= least) {
      best = parts;
      least = size;
    }
  }
  return best;
}

// A warp's part of a product: `rows` rows and `cols` columns, from `row` and `col` on.
template <int height, int columns, int warps>
struct Part {
  static constexpr int down = parts_of_rows(height, columns, warps);
  static constexpr int across = warps / down;
  static constexpr int rows = height / down;
  static constexpr int cols = cdiv(columns, across* step) * step;
  static constexpr bool whole = cols * across == columns;  // else some lie behind its end
  using Sums = float[rows / step][cols / 8][4];
  static constexpr int fours = rows / step * (cols / 8);

  int row, col, end = columns;

  __device__ __forceinline__ Part() {
    const int warp = opaque(int(threadIdx.x)) / warp_size;
    row = warp % down * rows;
    col = warp / down * cols;
  }
  __device__ __forceinline__ bool has(int n) const { return whole || col + n * step < end; }
};

// A warp's part of dQ, which comes in slices of its columns: registers beside dK and dV are few.
template <int height, int depth, int warps, int slices,
          int columns = cdiv(depth, slices* step) * step>
struct QueryPart : Part<height, columns, warps> {
  using Base = Part<height, columns, warps>;
  static constexpr bool whole = Base::whole && columns * slices == depth;

  __device__ __forceinline__ explicit QueryPart(int slice) {
    this->col += slice * columns;
    this->end = min(this->end + slice * columns, depth);
  }
  __device__ __forceinline__ bool has(int n) const {
    return whole || this->col + n * step < this->end;
  }
};

// D += A B for one step of the sum, of A's fragments and B's by columns of 16.
template <int rows, int blocks, class Has, class Load>
__device__ __forceinline__ void multiply_step(float (&D)[rows][blocks][4],
                                              const unsigned (&a)[rows][4], Has has, Load load) {
#pragma unroll
  for (int n = 0; n < blocks / 2; ++n) {
    if (!has(n)) continue;
    unsigned b[4];
    load(b, n);
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      multiply_add<operand>(D[i][2 * n], a[i], b[0], b[1]);
      multiply_add<operand>(D[i][2 * n + 1], a[i], b[2], b[3]);
    }
  }
}

// D += A B^T for rows of both, with `at_once` steps of the sum unrolled: with more, loads of later
// steps take the registers of what waits.
template <int at_once = 2, class Own, int rows, int blocks, int height, int other, int length>
__device__ __forceinline__ void multiply_transposed(float (&D)[rows][blocks][4],
                                                    operand (&A)[height][length],
                                                    operand (&B)[other][length], const Own& own,
                                                    int lane) {
  const Spots of_A(A, own.row + lane % 16, lane / 16);
  const Spots of_B(B, own.col + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll at_once
  for (int k = 0; k < length / step; ++k) {
    unsigned a[rows][4];
#pragma unroll
    for (int i = 0; i < rows; ++i) ldmatrix(a[i], of_A(i * step, 2 * k));
    multiply_step(
        D, a, [&](int n) { return own.has(n); },
        [&](unsigned (&b)[4], int n) { ldmatrix(b, of_B(n * step, 2 * k)); });
  }
}

// D += A B, or D += A^T B: sums over the rows of B.
template <bool of_columns, class Own, int rows, int blocks, int height, int length, int other,
          int columns>
__device__ __forceinline__ void multiply_tiles(float (&D)[rows][blocks][4],
                                               operand (&A)[height][length],
                                               operand (&B)[other][columns], const Own& own,
                                               int lane) {
#pragma unroll
  for (int k = 0; k < other / step; ++k) {
    unsigned a[rows][4];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      if constexpr (of_columns) {
        const int row = lane / 16 * 8 + lane % 8, chunk = own.row / 8 + 2 * i + lane / 8 % 2;
        ldmatrix_trans(a[i], at(A, row, chunk, k * step));
      } else {
        ldmatrix(a[i], Spots(A, own.row + lane % 16, lane / 16)(i * step, 2 * k));
      }
    }
    multiply_step(
        D, a, [&](int n) { return own.has(n); },
        [&](unsigned (&b)[4], int n) {
          const int chunk = own.col / 8 + 2 * n + lane / 16;
          ldmatrix_trans(b, at(B, lane % 16, chunk, k * step));
        });
  }
}

// S becomes P = 2^(S * scale2 - lse2); 0 where the mask hides a pair. A row that sees no key has
// lse2 = infinity, and so P = 0.
template <bool masked, class Own, int m, int n, int rows, int keys>
__device__ __forceinline__ void compute_P(float (&S)[m][n][4], const float (&lse2)[rows],
                                          const Own& own, TilePair<rows, keys> pair, float scale2,
                                          int lane) {
  pair.first_key = opaque(pair.first_key);  // the mask takes no registers before
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const int row = own.row + i * 8 + lane / 4;
    const float exponent = lse2[row];
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      float& x = S[i / 2][j / 2][i % 2 * 2 + j % 2];
      const int key = own.col + j / 2 * 8 + 2 * (lane % 4) + j % 2;
      x = exp2f(x * scale2 - exponent);
      if (masked && !pair.sees(row, key)) x = 0;
    }
  }
}

// dP = dO V^T becomes dS = P * (dP - delta), without the scale.
template <class Own, int m, int n, int rows>
__device__ __forceinline__ void compute_dS(float (&dP)[m][n][4], const float (&P)[m][n][4],
                                           const float (&delta)[rows], const Own& own, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const float mean = delta[own.row + i * 8 + lane / 4];
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      float& x = dP[i / 2][j / 2][i % 2 * 2 + j % 2];
      x = P[i / 2][j / 2][i % 2 * 2 + j % 2] * (x - mean);
    }
  }
}

// Both at once for modified scores, whose slope is known only while the score is.
template <bool masked, class Own, int m, int n, int rows, int keys>
__device__ __forceinline__ void compute_P_and_dS(float (&S)[m][n][4], float (&dP)[m][n][4],
                                                 const float (&lse2)[rows],
                                                 const float (&delta)[rows], const Own& own,
                                                 TilePair<rows, keys> pair,
                                                 const Scorer<float>& scorer, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const int row = own.row + i * 8 + lane / 4;
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      float& x = S[i / 2][j / 2][i % 2 * 2 + j % 2];
      float& y = dP[i / 2][j / 2][i % 2 * 2 + j % 2];
      const int key = own.col + j / 2 * 8 + 2 * (lane % 4) + j % 2;
      const auto [score, slope] = scorer.with_slope(x);
      x = masked && !pair.sees(row, key) ? 0.0f : exp2f(score * log2e - lse2[row]);
      y = score_gradient(x, y - delta[row], slope);
    }
  }
}

// Writes a warp's part of P or dS, rounded to 16 bits.
template <class Own, int m, int n, int rows, int keys>
__device__ __forceinline__ void store_tile(operand (&tile)[rows][keys],
                                           const float (&part)[m][n][4], const Own& own, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      operand* to = at(tile, own.row + lane / 4, own.col / 8 + j, i * 8) + 2 * (lane % 4);
      *reinterpret_cast<unsigned*>(to) =
          pack<operand>(part[i / 2][j][i % 2 * 2], part[i / 2][j][i % 2 * 2 + 1]);
    }
  }
}

// Writes a warp's part of a gradient times a factor, in rows before `end` and columns before
// `end_col`.
template <int cols, class Own, int rows, int blocks>
__device__ __forceinline__ void store_gradient(Tensor<scalar> gradient,
                                               const float (&sums)[rows][blocks][4], float factor,
                                               const Own& own, int batch, int head, int first_row,
                                               int end, int lane, int end_col = cols) {
  const bool aligned = is_aligned(gradient);
#pragma unroll
  for (int i = 0; i < 2 * rows; ++i) {
    const int row = first_row + own.row + i * 8 + lane / 4;
    unsigned pairs[blocks];
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      const float (&sum)[4] = sums[i / 2][n];
      pairs[n] = pack<operand>(sum[i % 2 * 2] * factor, sum[i % 2 * 2 + 1] * factor);
    }
    store_row<cols>(gradient.row(batch, head, row), pairs, own.col, aligned, row < end, lane,
                    end_col);
  }
}

// RowStats of a thread's rows of a tile, on their way from global to shared memory.
template <int rows>
struct RowLoads {
  static constexpr int count = cdiv(rows, threads);
  float lse2[count], delta[count];

  __device__ __forceinline__ void load(Tensor<const real> all_lse, Tensor<const real> all_delta,
                                       int batch, int head, int first_row, int M) {
    share_out<threads, rows, count>([&](int i, int turn) {
      const int row = first_row + i;
      lse2[turn] = infinity;
      delta[turn] = 0;
      if (row >= M) return;
      const float lse = *all_lse.row(batch, head, row);
      if (lse == -infinity) return;
      lse2[turn] = lse * log2e;
      delta[turn] = *all_delta.row(batch, head, row);
    });
  }
  __device__ __forceinline__ void store(float (&to_lse2)[rows], float (&to_delta)[rows]) const {
    share_out<threads, rows, count>([&](int i, int turn) {
      to_lse2[i] = lse2[turn];
      to_delta[i] = delta[turn];
    });
  }
};

// The RowStats of any row, for repairs.
struct StatsInMemory {
  Tensor<const real> lse, delta;
  int batch;

  __device__ RowStats operator()(int head, int row) const {
    const float own = *lse.row(batch, head, row);
    if (own == -infinity) return {infinity, 0};
    return {own * log2e, *delta.row(batch, head, row)};
  }
};

// Calls a body that is rarely needed, so that the kernel's loop keeps the registers it would take.
template <class Body>
__device__ __noinline__ void call_rarely(const Body& body) {
  body();
}
