// by_boxes: persistent blocks copy tiles by TMA boxes, and each thread computes one row.
#include <ptx/tma_store.cuh>
#include <tile/tma_tile.cuh>
#include <tile/math.cuh>
#include <tile/shared.cuh>
#include <tile/tensor.cuh>
#include <ptx/wgmma.cuh>

struct Shared {
  TmaTile<scalar, Br, columns> Q;  // reused for O
  TmaTile<scalar, Bc, columns> K, V;
  Barrier full;
};
static_assert(sizeof(Shared) == shared_bytes, "the record's shared= and struct Shared disagree");

template <int rows>
__device__ scalar& at(TmaTile<scalar, rows, columns>& tile, int row, int col) {
  return tile.at(row, col / 8)[col % 8];
}

template <int rows>
__device__ void load(TmaTile<scalar, rows, columns>& tile, const TensorMap& map, Barrier& full,
                     int row, int head, int batch) {
  for (int i = 0; i < columns / 64; ++i) tma_load(tile.box[i], map, full, 64 * i, row, head, batch);
}

extern "C" __global__ __launch_bounds__(threads, 1) void by_boxes(
    const __grid_constant__ TensorMap Q, const __grid_constant__ TensorMap K,
    const __grid_constant__ TensorMap V, const __grid_constant__ TensorMap O, int M, int N,
    int heads, int batch, int group, real scale) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) {
    init_barrier(shared.full, 1);
    fence_barrier_init();
  }
  __syncthreads();
  wgmma_fence();  // without effect, but makes the kernel require sm_90a
  const int tiles = cdiv(M, Br);
  int phase = 0;
  for (int index = blockIdx.x; index < tiles * heads * batch; index += gridDim.x) {
    const Place here = place(index, tiles, heads);
    if (threadIdx.x == 0) {
      arrive_expect_tx(shared.full, sizeof(shared.Q));
      load(shared.Q, Q, shared.full, here.tile * Br, here.head, here.batch);
    }
    wait(shared.full, phase);
    phase ^= 1;
    float maximum = -infinity, sum = 0, out[columns] = {};
    for (int first = 0; first < N; first += Bc) {
      fence_proxy_async();  // copies may not overtake this thread's reads
      __syncthreads();      // all threads have read K and V, which are overwritten next
      if (threadIdx.x == 0) {
        arrive_expect_tx(shared.full, sizeof(shared.K) + sizeof(shared.V));
        load(shared.K, K, shared.full, first, here.head / group, here.batch);
        load(shared.V, V, shared.full, first, here.head / group, here.batch);
      }
      wait(shared.full, phase);
      phase ^= 1;
      for (int key = 0; threadIdx.x < Br && key < Bc && first + key < N; ++key) {
        float score = 0;
        for (int i = 0; i < columns; ++i)  // columns beyond d are zero
          score += float(at(shared.Q, threadIdx.x, i)) * float(at(shared.K, key, i));
        score *= scale;
        const float higher = fmaxf(maximum, score);
        const float factor = expf(maximum - higher), weight = expf(score - higher);
        for (int i = 0; i < columns; ++i)
          out[i] = out[i] * factor + weight * float(at(shared.V, key, i));
        sum = sum * factor + weight;
        maximum = higher;
      }
    }
    if (threadIdx.x < Br)
      for (int i = 0; i < columns; ++i)
        at(shared.Q, threadIdx.x, i) = scalar(sum ? out[i] / sum : 0);
    fence_proxy_async();
    __syncthreads();  // all rows of O are written and can be copied
    if (threadIdx.x == 0) {
      for (int i = 0; i < columns / 64; ++i)
        tma_store(O, shared.Q.box[i], 64 * i, here.tile * Br, here.head, here.batch);
      bulk_commit_group();
      bulk_wait_group_read();
    }
    __syncthreads();  // O has been copied, and the next Q may overwrite it
  }
}
