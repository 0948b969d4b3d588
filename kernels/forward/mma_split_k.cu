// mma_split_k: `mma_async`, with the keys of a row tile shared out to several blocks.
//
// Few queries make few row tiles, and their blocks leave most of the device idle while K and V, all
// that there is to read, come one tile after another. Here each of `parts` blocks takes a part of
// the keys, and merge_parts adds up what they found. K and V pass by in a ring of `stages` tiles,
// so that enough bytes are on the way to keep memory busy. One part writes O and lse by itself.
//
//   Q, O [batch, heads, M, d | dv]    K, V [batch, kv_heads, N, d | dv]    lse [batch, heads, M]
//   O_parts [batch, heads, M, parts, width]    max_parts, sum_parts [batch, heads, M, parts]
//   grid (cdiv(M * packed, Br) * parts * heads / packed * batch)    block (32 * Br / Wr)
//   the host sets: scalar, operand, real, Br, Bc, Wr, stages, packed, d, dv, causal, windowed,
//   threads, shared_bytes
#include <async_tile.cuh>
#include <cp_async.cuh>
#include <fragments.cuh>
#include <fresh.cuh>
#include <mask.cuh>
#include <mma.cuh>
#include <shared.cuh>
#include <tensor.cuh>
#include <tile.cuh>
#include <warp.cuh>

constexpr int depth = cdiv(d, step) * step;  // of Q and K, filled up with zeros

struct Shared {
  operand Q[Br][depth < width ? width : depth];  // at the end O takes its place
  operand K[stages][Bc][depth];
  operand V[stages][Bc][width];
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");
static_assert(sizeof(operand) == 2, "these tensor-core products take 16-bit numbers");
static_assert(threads == warp_size * Br / Wr, "each warp owns Wr rows");
static_assert(stages >= 2, "the next tile is loaded while this one is multiplied");
static_assert(Wr % step == 0 && Bc % step == 0, "tiles are made of whole products");

// Takes the sign of the scale, or its being 0, into Q, which leaves a positive scale.
__device__ void apply_sign(Shared& shared, float scale) {
#pragma unroll 1
  for (int i = threadIdx.x; i < Br * depth; i += threads) {
    operand& q = at(shared.Q, i / depth, i % depth / in_chunk)[i % in_chunk];
    q = operand(float(q) * (scale < 0 ? -1.0f : 0.0f));
  }
}

// S = Q K^T for the warp's rows and the tile's keys.
__device__ __forceinline__ void multiply_scores(Shared& shared, operand (&K)[Bc][depth],
                                                Fragments<Bc>& S, int first_row, int lane) {
#pragma unroll
  for (int k = 0; k < depth / step; ++k) {
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
      load_matrices(a[i], at(shared.Q, first_row + i * step + lane % 16, 2 * k + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < Bc / step; ++n) {
      unsigned b[4];
      load_matrices(b, at(K, n * step + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < Wr / step; ++i) {
        multiply_add<operand>(S[i][2 * n], a[i], b[0], b[1]);
        multiply_add<operand>(S[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// P of 16 keys, two products of S side by side, is an operand of O += P V. It is computed right
// before, so that exponentials of some keys and products of others go on together.
__device__ __forceinline__ void multiply_output(operand (&V)[Bc][width], Fragments<Bc>& S,
                                                Fragments<width>& O, Rows& rows, int lane) {
  float sum[Wr / step][2] = {};
#pragma unroll
  for (int k = 0; k < Bc / step; ++k) {
    exponentiate(S, 2 * k, rows, sum);
    exponentiate(S, 2 * k + 1, rows, sum);
    unsigned a[Wr / step][4];
#pragma unroll
    for (int i = 0; i < Wr / step; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float (&p)[4] = S[i][2 * k + j / 2];
        a[i][j] = pack<operand>(p[j % 2 * 2], p[j % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < width / step; ++n) {
      unsigned b[4];
      load_matrices_transposed(b, at(V, k * step + lane % 16, 2 * n + lane / 16));
#pragma unroll
      for (int i = 0; i < Wr / step; ++i) {
        multiply_add<operand>(O[i][2 * n], a[i], b[0], b[1]);
        multiply_add<operand>(O[i][2 * n + 1], a[i], b[2], b[3]);
      }
    }
  }
  rows.add(sum);
}

// The same where V holds infinities or NaN: a masked key has weight 0, but 0 * NaN is NaN, so each
// row takes the keys that it sees alone.
__device__ __forceinline__ void multiply_visible(operand (&V)[Bc][width], Fragments<Bc>& P,
                                                 Fragments<width>& O, Rows& rows, int first_key,
                                                 int lane) {
  exponentiate(P, rows);
#pragma unroll 1
  for (int key = 0; key < Bc; ++key) {
    float weights[2 * (Wr / step)];
#pragma unroll
    for (int i = 0; i < 2 * (Wr / step); ++i) {
      unsigned mine = 0;
#pragma unroll
      for (int c = 0; c < Bc / 4; ++c) {
        const float p = P[i / 2][c / 2][i % 2 * 2 + c % 2];
        mine |= bits_if(key / 8 * 2 + key % 2 == c, p);
      }
      weights[i] = __shfl_sync(full_warp, __uint_as_float(mine), lane / 4 * 4 + key % 8 / 2);
    }
#pragma unroll
    for (int j = 0; j < width / 4; ++j) {
      const int col = j / 2 * 8 + 2 * (lane % 4) + j % 2;
      const float v = float(at(V, key, col / in_chunk)[col % in_chunk]);
#pragma unroll
      for (int i = 0; i < 2 * (Wr / step); ++i) {
        float& sum = O[i / 2][j / 2][i % 2 * 2 + j % 2];
        if (rows.sees(i / 2, i % 2, first_key + key)) sum += weights[i] * v;
      }
    }
  }
}

// The tiles of a part of the keys from `start` to `end`: as many as of every other, or one more.
struct Part {
  int first_key, end;

  __device__ Part(int start, int end, int part, int parts) {
    const int tiles = cdiv(max(0, end - start), Bc), less = tiles / parts, rest = tiles % parts;
    first_key = start + (part * less + min(part, rest)) * Bc;
    this->end = min(end, first_key + (less + (part < rest)) * Bc);
  }
};

// What a warp has to do with each tile of keys.
struct Task {
  Shared& shared;
  Head keys, values;
  int own_row, lane;
  int end;  // of the part's keys
};

// Begins to copy a tile of K and V, if the part has one there.
__device__ __forceinline__ void copy_keys(const Task& task, int first_key, int buffer) {
  if (first_key < task.end) {
    copy_rows<d>(task.shared.K[buffer], task.keys, first_key);
    copy_rows<dv>(task.shared.V[buffer], task.values, first_key);
  }
  commit_copies();
}

// One tile of keys: S = Q K^T, P = softmax(S), O += P V. Unless it is `masked`, all rows see all of
// its keys.
template <bool masked>
__device__ __forceinline__ void attend(const Task& task, int first_key, int buffer,
                                       Fragments<width>& O, Rows& rows) {
  Shared& shared = task.shared;
  // Whether the warp's last row, and so any of its rows, sees a key of the tile.
  const bool seen = !masked || first_key < visible_keys((rows.row(Wr / step - 1, 1) | 7) / packed,
                                                        rows.N, rows.diagonal);
  wait_for_copies<stages - 2>();
  __syncthreads();  // the tile is there, and the one before it is no longer read
  copy_keys(task, first_key + (stages - 1) * Bc, buffer == 0 ? stages - 1 : buffer - 1);
  const bool strange = has_mask && masked && __syncthreads_or(is_strange(shared.V[buffer]));
  if (!seen) return;
  Fragments<Bc> S = {};
  multiply_scores(shared, shared.K[buffer], S, task.own_row, task.lane);
  rescale<masked>(S, O, rows, first_key, task.lane);
  if (strange)
    multiply_visible(shared.V[buffer], S, O, rows, first_key, task.lane);
  else
    multiply_output(shared.V[buffer], S, O, rows, task.lane);
}

// Writes the warp's rows of O, if it has the operands' type, by way of shared memory, so that lanes
// store 16 bytes side by side.
__device__ void store_output(Shared& shared, const Fragments<width>& O, Tensor<scalar> out,
                             int batch, int head, int first_row, int M, int own_row, int lane) {
  constexpr int chunks = width / in_chunk;
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
#pragma unroll
    for (int n = 0; n < chunks; ++n) {
      operand* to = at(shared.Q, own_row + i * 8 + lane / 4, n) + 2 * (lane % 4);
      *reinterpret_cast<unsigned*>(to) =
          pack<operand>(O[i / 2][n][i % 2 * 2], O[i / 2][n][i % 2 * 2 + 1]);
    }
  }
  __syncwarp();
  const bool aligned = is_aligned(out);
#pragma unroll 4
  for (int i = lane; i < Wr * chunks; i += warp_size) {
    const int row = i / chunks, chunk = i % chunks, count = min(in_chunk, dv - chunk * in_chunk);
    const int packed_row = first_row + own_row + row;
    if (packed_row >= M * packed) continue;
    const operand* from = at(shared.Q, own_row + row, chunk);
    scalar* to =
        out.row(batch, head * packed + packed_row % packed, packed_row / packed) + chunk * in_chunk;
    if (aligned && count == in_chunk) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int j = 0; j < count; ++j) to[j] = from[j];
    }
  }
}

// Writes what merge_parts needs of the warp's rows: the sums of O, undivided, what weights are
// relative to, and the sums of weights.
__device__ void store_part(const Fragments<width>& O, const Rows& rows, float* O_parts,
                           float* max_parts, float* sum_parts, int part, int parts, int batch,
                           int head, int heads, int M, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * (Wr / step); ++i) {
    const int row = rows.row(i / 2, i % 2);
    float sum = rows.sum[i / 2][i % 2];
    sum += __shfl_xor_sync(full_warp, sum, 1);
    sum += __shfl_xor_sync(full_warp, sum, 2);
    if (row >= M * packed) continue;
    const long long first = (long long)(batch * heads + head * packed + row % packed) * M;
    const long long place = (first + row / packed) * parts + part;
    if (lane % 4 == 0) {
      max_parts[place] = rows.maximum[i / 2][i % 2];
      sum_parts[place] = sum;
    }
    float* to = O_parts + place * width + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < width / 8; ++n) {
      *reinterpret_cast<float2*>(to + n * 8) = {O[i / 2][n][i % 2 * 2], O[i / 2][n][i % 2 * 2 + 1]};
    }
  }
}

extern "C" __global__ __launch_bounds__(threads, 1) void mma_split_k(
    Tensor<const operand> Q, Tensor<const operand> K, Tensor<const operand> V, Tensor<scalar> O,
    Tensor<real> lse, float* O_parts, float* max_parts, float* sum_parts, int parts, int M, int N,
    int heads, int group, int diagonal, int lower, real scale) {
  Shared& shared = shared_memory<Shared>();
  const int tiles = cdiv(M * packed, Br);
  const auto [index, head, batch] = place(blockIdx.x, tiles * parts, heads / packed);
  // The longest rows of a causal mask first; blocks with the same keys one after another.
  const int first_row = (tiles - 1 - index % tiles) * Br;
  const int lane = threadIdx.x % warp_size, own_row = threadIdx.x / warp_size * Wr;
  const Head queries(Q, batch, head * packed, M * packed);
  Head keys(K, batch, head * packed / group, N), values(V, batch, head * packed / group, N);
  const int seen_by_all = visible_keys(first_row / packed, N, diagonal);
  const int last_row = (min(first_row + Br, M * packed) - 1) / packed;
  const int hidden_from_some = hidden_keys(last_row, N, lower);
  const int start =
      hidden_keys(first_row / packed, N, lower) / Bc * Bc;  // the first tile that is seen
  const Part part(start, visible_keys(last_row, N, diagonal), index / tiles, parts);

  copy_rows<d, packed>(shared.Q, queries, first_row);
  commit_copies();
  keys.aligned = values.aligned = keys.aligned && values.aligned;  // in one register
  const Task task = {shared, keys, values, own_row, lane, part.end};
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) copy_keys(task, part.first_key + i * Bc, i);
  if (scale <= 0) {
    wait_for_copies<stages - 1>();
    __syncthreads();  // Q is there
    apply_sign(shared, scale);
  }
  Fragments<width> sums = {};
  Rows rows(first_row + own_row + lane / 4, N, diagonal, lower, scale == 0 ? 1.0f : fabs(scale));
  int buffer = 0;
  for (int first_key = part.first_key; first_key < part.end; first_key += Bc) {
    if (first_key + Bc <= seen_by_all && first_key >= hidden_from_some)
      attend<false>(task, first_key, buffer, sums, rows);
    else
      attend<true>(task, first_key, buffer, sums, rows);
    buffer = buffer == stages - 1 ? 0 : buffer + 1;
  }
  wait_for_copies<0>();
  __syncthreads();  // Q is no longer read, nor written
  // Registers do not keep the place through the loop: it is found once more.
  const int same_tiles = cdiv(fresh(M) * packed, Br);
  const Place same = place(fresh(int(blockIdx.x)), same_tiles * parts, heads / packed);
  const int row = (same_tiles - 1 - same.tile % same_tiles) * Br;
  if (parts > 1) {
    store_part(sums, rows, O_parts, max_parts, sum_parts, same.tile / same_tiles, parts, same.batch,
               same.head, heads, M, lane);
    return;
  }
  finish_rows(sums, rows, lse, same.batch, same.head, M, lane);
  if constexpr (sizeof(scalar) == sizeof(operand))
    store_output(shared, sums, O, same.batch, same.head, row, M, own_row, lane);
  else
    store_rows(sums, rows, O, same.batch, same.head, M, lane);
}
