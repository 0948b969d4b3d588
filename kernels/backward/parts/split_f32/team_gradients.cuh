#pragma once
// Computes dK and dV when their accumulators do not fit into the registers of one warp. A team of
// four warps shares 32 keys, called rows here, and each warp accumulates 64 or 32 columns. In each
// tile of 16 or 32 queries a warp computes 16 x 16 weights (with 16 queries, only two warps do) and
// passes them to the team as split operands, with a power of two for each row.

#include <backward/parts/split_f32/split_gradients.cuh>
#include <forward/parts/split_f32/split_products.cuh>
#include <ptx/named_barrier.cuh>
#include <ptx/opaque.cuh>
#include <timeline.cuh>

constexpr int team = 4, team_rows = 2 * step;
template <int columns>
constexpr int own_columns = columns <= team * 32 ? 32 : 64;
template <int columns>
using TeamSums = float[2][own_columns<columns> / 8][4];
using Weights = float[1][2][4];

// A warp's team (`group`), its rank within the team (`turn`), and the first row (`row`) and column
// (`number`) of the weights that it computes.
struct TeamPlace {
  int group, turn, row, number, lane;

  __device__ __forceinline__ TeamPlace() {
    const int warp = opaque(int(threadIdx.x)) / warp_size;
    group = warp / team;
    turn = warp % team;
    row = group * team_rows + turn / 2 * step;
    number = turn % 2 * step;
    lane = threadIdx.x % warp_size;
  }
};

struct alignas(16) Registers {
  unsigned of[4];
};

// A tile's weights as split operands, stored by lane, and factors that undo the scaling of rows.
template <int rows, int across>
struct TeamWeights {
  static_assert(rows % team_rows == 0 && (across == step || across == 2 * step));
  static constexpr int block = rows / team_rows * team * warp_size;  // threads per block
  Registers parts[rows / step][across / step][2][warp_size];         // high and low halves
  float factors[across / step][rows];
  unsigned char wrong[team][rows];

  // Returns whether this warp computes weights.
  static __device__ __forceinline__ bool has_own() {
    return across == 2 * step || TeamPlace().number < across;
  }
  // Returns the factor of the lane's row. Only the first two of every four lanes own a row.
  __device__ __forceinline__ float& own_factor(const TeamPlace& own) {
    return factors[own.number / step][own.row + own.lane / 4 + own.lane % 4 * 8];
  }

  __device__ __forceinline__ void give(Weights& weights, Largest<1>& largest) {
    const TeamPlace own;
    float factor[1][2];
    largest.raise(weights, factor);
    Registers high, low;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&pair)[4] = weights[0][i / 2];
      split_pair<operand>(pair[i % 2 * 2], pair[i % 2 * 2 + 1], high.of[i], low.of[i]);
    }
    Registers(&to)[2][warp_size] = parts[own.row / step][own.number / step];
    to[0][own.lane] = high;
    to[1][own.lane] = low;
    if (own.lane % 4 < 2) own_factor(own) = factor[0][own.lane % 4 == 1];
  }

  // Waits until all warps of the team have written their weights.
  static __device__ __forceinline__ void meet_team() {
    barrier_sync(1 + TeamPlace().group, team * warp_size);
  }

  // Adds weights * B to `sums`, for the team's rows and the warp's columns of B.
  template <int columns>
  __device__ __forceinline__ void multiply(TeamSums<columns>& sums,
                                           operand (&B)[2][across][columns]) const {
    const timeline::Phase phase(timeline::products);
    constexpr int width = own_columns<columns>, steps = width / step;
    static_assert(columns <= team * width && steps % 2 == 0, "the last load goes to buffer 0");
    const TeamPlace own;
    const int col = own.turn * width;
    constexpr bool whole = columns == team * width;
    if (!whole && col >= columns) return;
    ChunkAddresses values(B[0], own.lane % 16, col / in_chunk + own.lane / 16);
    unsigned B_high[2][4], B_low[2][4];  // for this step and the next
    const auto has = [&](int j) { return whole || col + j * step < columns; };
    const auto load = [&](int i, int j) {
      if (!has(j)) return;
      ldmatrix_trans(B_high[i], values(0, j * 2));
      ldmatrix_trans(B_low[i], values(across, j * 2));
    };
    load(0, 0);
#pragma unroll 1
    for (int k = 0; k < across / step; ++k) {
      unsigned high[2][4], low[2][4];
      float factor[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = own.group * 2 + i;
        const Registers a = parts[row][k][0][own.lane], b = parts[row][k][1][own.lane];
#pragma unroll
        for (int e = 0; e < 4; ++e) high[i][e] = a.of[e], low[i][e] = b.of[e];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          factor[i][half] = factors[k][row * step + half * 8 + own.lane / 4];
      }
#pragma unroll
      for (int j = 0; j < steps; ++j) {
        // After the last columns, moves to the next rows, or back to the first for an unused load.
        constexpr int down = step * columns * int(sizeof(operand));
        if (j == steps - 1) values.first.bytes += k + 1 < across / step ? down : -k * down;
        load((j + 1) % 2, (j + 1) % steps);
        if (!has(j)) continue;
        float main[2][2][4] = {};
        LowSums<2, 2, false> C;
        multiply_split(main, C, 0, high, low, B_high[j % 2], B_low[j % 2]);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int row = i / 8, half = i / 4 % 2, e = i % 4;
          float& x = sums[row][2 * j + half][e];
          x = fmaf(fmaf(C(row, half, e), low_unit, main[row][half][e]), factor[row][e / 2], x);
        }
      }
    }
  }

  // Stores the warp's columns of gradient rows from first_row on, and calls flag(row, is_wrong) for
  // each row of the block. is_inaccurate() has another parameter: whether the row's weights are
  // tiny. The others are those of is_wrong() and store_scaled(). Without `has_least` every sum
  // counts as accurate.
  template <int cols, int columns, class IsInaccurate, class Power, class Flag>
  __device__ __forceinline__ void store(const TeamSums<columns>& sums, const Largest<1>& largest,
                                        bool has_least, float factor, Tensor<result> gradient,
                                        int batch, int head, int first_row, int end,
                                        IsInaccurate is_inaccurate, Power power, Flag flag) {
    const TeamPlace own;
    const int first = own.group * team_rows, col = own.turn * own_columns<columns>;
    if (has_own() && own.lane % 4 < 2) own_factor(own) = largest.weight[0][own.lane % 4 == 1];
    __syncthreads();  // wait for all largest weights
    Largest<2> of_all;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + i * 8 + own.lane / 4;
      float& weight = of_all.weight[i / 2][i % 2];
      for (int k = 0; k < across / step; ++k) weight = fmax(weight, factors[k][row]);
      const float least = has_least ? of_all.least_sum(i / 2, i % 2) : 0;
      const auto inaccurate = [&](int c) { return is_inaccurate(c, weight < of_all.least_weight); };
      const bool is_not_held =
          col < cols && is_wrong<cols>(sums, i / 2, i % 2, least, own.lane, inaccurate, col);
      if (own.lane % 4 == 0) wrong[own.turn][row] = is_not_held;
    }
    // Stores numbers one by one: in pairs, as store_scaled() does, the main loop would spill.
#pragma unroll
    for (int j = 0; j < own_columns<columns> / 4; ++j) {
      const int to = col + j / 2 * 8 + 2 * (own.lane % 4) + j % 2;
      if (to >= cols) continue;
      const int all = power(to), half = all >> 1;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first_row + first + i * 8 + own.lane / 4;
        const float x = sums[i / 2][j / 2][i % 2 * 2 + j % 2] * two_to(half) * two_to(all - half);
        if (row < end) gradient.row(batch, head, row)[to] = x * factor;
      }
    }
    __syncthreads();  // wait for all elements of `wrong`
    for (int row = threadIdx.x; row < rows && first_row + row < end; row += block) {
      bool is_not_held = false;
      for (int i = 0; i < team; ++i) is_not_held |= wrong[i][row] != 0;
      flag(first_row + row, is_not_held);
    }
  }
};
