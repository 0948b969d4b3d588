#pragma once
// What a block leaves of a tile's rows if others have other keys, and how the last one merges it.

#include <attention/row_state.cuh>
#include <forward/parts/merge_parts.cuh>
#include <ptx/arrive.cuh>

constexpr int row_lanes = 8;                              // which weigh the parts of one row
constexpr int rows_side_by_side = warp_size / row_lanes;  // in a warp

// Where the parts of a tile's rows lie: `stored` rows of each head, pack_gqa heads to a tile.
template <int dv, int pack_gqa>
struct PartRows {
  Part<dv>* parts;
  Weight* weights;
  int num_splits, batch, first_head, heads, stored;

  __device__ __forceinline__ int query(int row) const { return row / pack_gqa; }
  __device__ __forceinline__ int head(int row) const { return first_head + row % pack_gqa; }
  // The first split of a row.
  __device__ __forceinline__ long long first(int row) const {
    return ((long long)(batch * heads + head(row)) * stored + query(row)) * num_splits;
  }
};

// Writes the split's part of the warp's rows.
template <int m, int n, int dv, int pack_gqa>
__device__ void store_parts(const float (&O)[m][n][4], const Rows<m * step, pack_gqa>& rows,
                            const PartRows<dv, pack_gqa>& to_rows, int split, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * m; ++i) {
    const int row = rows.row(i / 2, i % 2);
    float sum = rows.sum[i / 2][i % 2];
    sum += __shfl_xor_sync(full_warp, sum, 1);
    sum += __shfl_xor_sync(full_warp, sum, 2);
    if (row >= rows.extent.M * pack_gqa) continue;
    const long long place = to_rows.first(row) + split;
    if (lane % 4 == 0) to_rows.weights[place] = {rows.maximum[i / 2][i % 2], sum};
    float* to = to_rows.parts[place].O + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < Part<dv>::width / 8; ++j) {
      *reinterpret_cast<float2*>(to + j * 8) = {O[i / 2][j][i % 2 * 2], O[i / 2][j][i % 2 * 2 + 1]};
    }
  }
}

// Whether the block is the last one of a tile's that leaves its parts; it then sees those of all.
__device__ __forceinline__ bool arrives_last(unsigned* arrived, int num_splits) {
  __syncthreads();  // the block's parts are there
  const bool is_last = threadIdx.x == 0 && arrive(arrived, num_splits) == num_splits - 1;
  return __syncthreads_or(is_last);
}

// A warp's part of the shared memory, for the parts of some rows and, of each row, the factors of
// its splits, the inverse of its sum, and whether it has to be computed again.
template <int dv, int bytes>
struct Room {
  static constexpr int size = bytes / int(sizeof(float4)) * 4;  // floats
  static constexpr int width = Part<dv>::width;
  float* begin;
  int num_splits;

  __device__ __forceinline__ int row_size() const {
    return num_splits * width + cdiv(num_splits + 2, 4) * 4;
  }
  __device__ __forceinline__ int rows() const { return size / row_size(); }
  __device__ __forceinline__ float* parts(int row) const { return begin + row * row_size(); }
  __device__ __forceinline__ float* factors(int row) const {
    return parts(row) + num_splits * width;
  }
  __device__ __forceinline__ float& inverse(int row) const { return factors(row)[num_splits]; }
  __device__ __forceinline__ float& wrong(int row) const { return factors(row)[num_splits + 1]; }
};

// Begins to copy the parts of a row.
template <int dv>
__device__ __forceinline__ void copy_parts(float* to, const Part<dv>* from, int num_splits) {
  constexpr int bytes = 16, in_part = sizeof(Part<dv>) / bytes;
#pragma unroll 8
  for (int i = threadIdx.x % warp_size; i < num_splits * in_part; i += warp_size)
    cp_async(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(from) + i, bytes);
}

// The factors of a row's splits and the inverse of its sum, by `row_lanes` lanes; lse is written.
template <class Memory>
__device__ __forceinline__ void weigh(const Memory& room, int place, const Weight* weights,
                                      const Extent& extent, Tensor<real> lse, int row, int batch,
                                      int head, bool exists) {
  const int lane = threadIdx.x % row_lanes, num_splits = room.num_splits;
  float maximum = weights[0].maximum, own = 0, sum = 0;
#pragma unroll 4
  for (int split = lane; split < num_splits; split += row_lanes)
    maximum = fmax(maximum, weights[split].maximum);
#pragma unroll
  for (int distance = row_lanes / 2; distance > 0; distance /= 2)
    maximum = fmax(maximum, __shfl_xor_sync(full_warp, maximum, distance));
#pragma unroll 4
  for (int split = lane % chains; split < num_splits; split += chains) {
    const float factor = exp2f(weights[split].maximum - maximum);
    own += factor * weights[split].sum;
    if (exists && lane < chains) room.factors(place)[split] = factor;
  }
#pragma unroll
  for (int i = 0; i < chains; ++i) sum += __shfl_sync(full_warp, own, i, row_lanes);
  if (!exists || lane > 0) return;
  room.inverse(place) = inverse_of(sum, extent);
  room.wrong(place) = is_wrong(sum, maximum, extent, row);
  *lse.row(batch, head, row) = maximum * ln2 + log(sum);
}

// A row of O from its parts and their factors. Returns whether it has to be computed again.
template <int dv, int bytes>
__device__ __forceinline__ bool add_parts(const Room<dv, bytes>& room, int place, scalar* out) {
  constexpr int width = Part<dv>::width;
  const int num_splits = room.num_splits;
  const float *parts = room.parts(place), *factors = room.factors(place);
  const float inverse = room.inverse(place);
  bool wrong = room.wrong(place) != 0;
#pragma unroll 1
  for (int col = 4 * (threadIdx.x % warp_size); col < width; col += 4 * warp_size) {
    float4 o[chains] = {};
    const auto add = [&](int split, int chain, float factor) {
      const float4 x = *reinterpret_cast<const float4*>(parts + split * width + col);
      o[chain].x += factor * x.x, o[chain].y += factor * x.y;
      o[chain].z += factor * x.z, o[chain].w += factor * x.w;
    };
    int split = 0;
#pragma unroll 2
    for (; split + chains <= num_splits; split += chains) {
      const float4 four = *reinterpret_cast<const float4*>(factors + split);
      add(split, 0, four.x), add(split + 1, 1, four.y);
      add(split + 2, 2, four.z), add(split + 3, 3, four.w);
    }
#pragma unroll
    for (int i = 0; i < chains - 1; ++i)
      if (split + i < num_splits) add(split + i, i, factors[split + i]);
    float total[4] = {};
#pragma unroll
    for (int i = 0; i < chains; ++i)
      total[0] += o[i].x, total[1] += o[i].y, total[2] += o[i].z, total[3] += o[i].w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i >= dv) continue;
      out[col + i] = scalar(total[i] * inverse);
      wrong |= total[i] != total[i];
    }
  }
  return __any_sync(full_warp, wrong);
}

// Merges `rows` rows from row `first_row` on, whose parts are all there. Each warp takes every row
// of some, as many at once as its room has space for. repair(row) computes a row again.
template <int threads, int dv, int bytes, int pack_gqa, class Repair>
__device__ __forceinline__ void merge_tile(const Room<dv, bytes>& room,
                                           const PartRows<dv, pack_gqa>& from, int first_row,
                                           int rows, const Extent& extent, Tensor<scalar> O,
                                           Tensor<real> lse, Repair repair) {
  constexpr int warps = threads / warp_size;
  const int warp = threadIdx.x / warp_size, at_once = room.rows();
#pragma unroll 1
  for (int first = warp; first < rows; first += at_once * warps) {
    const int count = min(at_once, cdiv(rows - first, warps));
    const auto row_at = [&](int i) { return first_row + first + i * warps; };
#pragma unroll 1
    for (int i = 0; i < count; ++i)
      copy_parts(room.parts(i), from.parts + from.first(row_at(i)), room.num_splits);
    cp_async_commit_group();
#pragma unroll 1
    for (int i = 0; i < count; i += rows_side_by_side) {
      const int own = i + threadIdx.x % warp_size / row_lanes, place = min(own, count - 1);
      const int row = row_at(place), head = from.head(row);
      weigh(room, place, from.weights + from.first(row), extent.of_head(head), lse, from.query(row),
            from.batch, head, own < count);
    }
    cp_async_wait_group<0>();
    __syncwarp();  // all parts and factors are there
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int row = row_at(i);
      if (!add_parts(room, i, O.row(from.batch, from.head(row), from.query(row)))) continue;
      __syncwarp();  // the repair overwrites what other lanes wrote
      repair(row);
    }
    __syncwarp();  // all parts are read
  }
}
