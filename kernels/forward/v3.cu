// v3: the loops of `minimal`, with both products on tensor cores.
//
// A block computes a whole Br x Bc tile of S with 16x16x16 matrix instructions instead of dot
// products. Q, K and V are also tiled along d and rounded to half as slices of Bd columns are
// loaded, so shared memory no longer depends on d. Accumulators are float; only operands are half.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_sum [batch, heads, M, dv], row_max, row_sum [batch, heads, M]: scratch
//   grid (heads * batch)    block (32 * Br * Bc / (Wr * Wc)): each warp owns Wr x Wc of S
//   the host sets: scalar, result, real, Br, Bc, Wr, Wc, d, dv, threads, shared_bytes and options
//   (extent.cuh)
#include <cuda_fp16.h>
#include <attention/online_softmax.cuh>
#include <attention/score.cuh>
#include <forward/parts/last_tile.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <tile/block_copy.cuh>
#include <tile/warp_max.cuh>
#include <ptx/wmma.cuh>
#include <timeline.cuh>

constexpr int Bd = Bc;    // columns of Q, K, V and O in shared memory at a time
constexpr int step = 16;  // rows, columns and depth of one matrix instruction
constexpr int warps = threads / warp_size;
constexpr int rounds = cdiv(Br * Bd, threads);  // elements of a slice of O per thread

struct Shared {
  float S[Br][Bc];
  float O[Br][Bd];
  OnlineSoftmax rows[Br];  // running maximum and sum of each row
  float keep[Br];          // factor that rescales the previous O
  float take[Br];          // factor of this tile's P V
  __half Q[Br][Bd];
  __half K[Bc][Bd];
  __half V[Bc][Bd];
  __half P[Br][Bc];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(real) == sizeof(float), "WMMA accumulators are float");
static_assert(threads == warp_size * (Br / Wr) * (Bc / Wc), "the warps' tiles must cover S");
static_assert(Wr % step == 0 && Wc % step == 0, "a warp's tile is made of 16 x 16 tiles");

// A warp's Wr x Wc accumulators of a product, and their position in the block's tile.
struct WarpTile {
  Accumulator sums[Wr / step][Wc / step] = {};
  int row, col;

  __device__ WarpTile(int warp) : row(warp / (Bc / Wc) * Wr), col(warp % (Bc / Wc) * Wc) {}

  __device__ void store_to(float (&tile)[Br][Bc]) const {
    for (int i = 0; i < Wr / step; ++i) {
      for (int j = 0; j < Wc / step; ++j) {
        store(&tile[row + i * step][col + j * step], Bc, sums[i][j]);
      }
    }
  }
};

// Loads columns first_col … of a tile and rounds them to half. Writes zeros outside the tensor.
template <int height>
__device__ void load_slice(__half (&slice)[height][Bd], Tensor<const scalar> tensor, int batch,
                           int head, int first_row, int rows, int first_col, int cols) {
  const timeline::Phase phase(timeline::loads, size_t(tensor.data) / 16);
  share_out<threads, height * Bd, 16>([&](int i, int) {
    const int row = i / Bd, col = i % Bd;
    const bool inside = first_row + row < rows && first_col + col < cols;
    slice[row][col] =
        inside ? __float2half(float(tensor.row(batch, head, first_row + row)[first_col + col]))
               : __float2half(0.0f);
  });
}

// Loads this thread's elements of O_sum early, while the tensor cores are busy.
__device__ void fetch_sums(float (&old)[rounds], Tensor<real> O_sum, int batch, int head,
                           int first_row, int rows, int first_col) {
  share_out<threads, Br * Bd, rounds>([&](int i, int round) {
    const int row = first_row + i / Bd, col = first_col + i % Bd;
    if (row < rows && col < dv) old[round] = O_sum.row(batch, head, row)[col];
  });
}

// S += Q K^T over the slices of Q and K in shared memory.
__device__ void multiply_scores(const Shared& shared, WarpTile& S) {
  const timeline::Phase phase(timeline::products);
#pragma unroll
  for (int k = 0; k < Bd; k += step) {
#pragma unroll
    for (int j = 0; j < Wc / step; ++j) {
      const auto b = load_b_columns(&shared.K[S.col + j * step][k], Bd);
#pragma unroll
      for (int i = 0; i < Wr / step; ++i) {
        multiply_add(S.sums[i][j], load_a(&shared.Q[S.row + i * step][k], Bd), b);
      }
    }
  }
}

// O = P V for the slice of V in shared memory.
__device__ void multiply_output(const Shared& shared, WarpTile& O) {
  const timeline::Phase phase(timeline::products);
#pragma unroll
  for (int k = 0; k < Bc; k += step) {
#pragma unroll
    for (int j = 0; j < Wc / step; ++j) {
      const auto b = load_b_rows(&shared.V[k][O.col + j * step], Bd);
#pragma unroll
      for (int i = 0; i < Wr / step; ++i) {
        multiply_add(O.sums[i][j], load_a(&shared.P[O.row + i * step][k], Bc), b);
      }
    }
  }
}

// Returns this tile's contribution to an element of O. A masked key has P = 0, but 0 * NaN is NaN:
// an element that is NaN is recomputed over the visible keys only.
__device__ float tile_output(const Shared& shared, int row, int col, int keys) {
  float sum = shared.O[row][col];
  if constexpr (causal) {
    if (isnan(sum)) {
      sum = 0;
      for (int key = 0; key < keys; ++key) {
        sum += __half2float(shared.P[row][key]) * __half2float(shared.V[key][col]);
      }
    }
  }
  return sum;
}

// Computes the softmax of a row of S with `keys` visible columns, by one warp: writes the row of P
// and updates `softmax`. Returns the factor that rescales the previous sum and output.
__device__ float softmax_row(Shared& shared, int row, int keys, int lane,
                             const Scorer<float>& scorer, OnlineSoftmax& softmax) {
  float largest = -infinity;
  for (int col = lane; col < min(Bc, keys); col += warp_size) {
    largest = fmax(largest, scorer(shared.S[row][col]));
  }
  const float factor = softmax.raise(warp_max(largest));
  float sum = 0;
  for (int col = lane; col < Bc; col += warp_size) {
    const float p = col < keys ? softmax.p(scorer(shared.S[row][col])) : 0.0f;
    shared.P[row][col] = __float2half(p);
    sum += p;
  }
  softmax.sum += warp_sum(sum);
  return factor;
}

extern "C" __global__ __launch_bounds__(threads) void v3(
    Tensor<const scalar> Q, Tensor<const scalar> K, Tensor<const scalar> V, Tensor<result> O,
    Tensor<real> lse, Tensor<real> O_sum, Tensor<real> row_max, Tensor<real> row_sum, Sizes sizes,
    int heads, int group, real scale, Mods mods) {
  Shared& shared = shared_memory<Shared>();
  const Place block = place(blockIdx.x, 1, heads);
  const int head = block.head, batch = block.batch, kv_head = head / group;
  const Extent extent = extent_of(sizes, batch);
  const int M = extent.M, N = extent.N;
  const Scorer<float> scorer = {scale, mods};
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;

  for (int tile = 0; tile <= last_tile(N, Bc); ++tile) {
    const int first_key = tile * Bc;
    for (int first_row = 0; first_row < M; first_row += Br) {
      const int last = last_tile(extent.kv_end(min(first_row + Br, M) - 1), Bc);
      if (tile > last) continue;

      timeline::event(timeline::tile, first_key, first_row);
      WarpTile S(warp);
      for (int row = threadIdx.x; row < Br; row += threads) {
        const bool begun = tile > 0 && first_row + row < M;
        shared.rows[row] = begun ? OnlineSoftmax{*row_max.row(batch, head, first_row + row),
                                                 *row_sum.row(batch, head, first_row + row)}
                                 : OnlineSoftmax{};
      }
      for (int slice = 0; slice < d; slice += Bd) {
        __syncthreads();  // before the loads overwrite slices that a slower warp still reads
        load_slice(shared.Q, Q, batch, head, first_row, M, slice, d);
        load_slice(shared.K, K, batch, kv_head, first_key, N, slice, d);
        __syncthreads();  // the slices have arrived
        multiply_scores(shared, S);
      }
      S.store_to(shared.S);
      __syncthreads();  // all of S is written

      timeline::event(timeline::softmax, Br * Bc / threads);
      for (int row = warp; row < Br; row += warps) {
        const int query = first_row + row;
        const int keys = query < M ? extent.kv_end(query) - first_key : 0;
        OnlineSoftmax softmax = shared.rows[row];
        const float old_sum = softmax.sum;
        const float factor = softmax_row(shared, row, keys, lane, scorer, softmax);
        if (lane > 0) continue;
        shared.keep[row] = old_sum * factor * softmax.inverse_sum();
        shared.take[row] = softmax.inverse_sum();
        if (query >= M) continue;
        *row_max.row(batch, head, query) = softmax.maximum;
        *row_sum.row(batch, head, query) = softmax.sum;
        if (tile == last) *lse.row(batch, head, query) = softmax.lse();
      }

      timeline::end(timeline::softmax);
      for (int slice = 0; slice < dv; slice += Bd) {
        float old[rounds] = {};
        if (tile > 0) fetch_sums(old, O_sum, batch, head, first_row, M, slice);
        load_slice(shared.V, V, batch, kv_head, first_key, N, slice, dv);
        __syncthreads();  // P, the rows' factors and the slice of V are ready
        WarpTile product(warp);
        multiply_output(shared, product);
        product.store_to(shared.O);
        __syncthreads();  // the slice of O is written

        const timeline::Phase phase(timeline::epilogue);
        share_out<threads, Br * Bd, rounds>([&](int i, int round) {
          const int row = i / Bd, col = i % Bd, query = first_row + row;
          if (query >= M || slice + col >= dv) return;
          const int keys = min(Bc, extent.kv_end(query) - first_key);
          const float product = tile_output(shared, row, col, keys);
          const float sum = old[round] * shared.keep[row] + product * shared.take[row];
          if (tile < last)
            O_sum.row(batch, head, query)[slice + col] = sum;
          else
            O.row(batch, head, query)[slice + col] = result(sum);
        });
        if constexpr (causal) __syncthreads();  // before V, read by tile_output, is overwritten
      }
    }
  }
}
