// O = P V: a producer warp loads tiles of V into a ring of two stages, consumer warps multiply.
#include <ptx/bulk_copy.cuh>

constexpr int columns = 32;  // columns of V and O
constexpr int keys = 8;      // keys per tile
constexpr int stages = 2;
constexpr int consumers = 64;  // threads: two warps, one row per warp, one column per lane

// P [2, N], V [N, 32], O [2, 32]; warp 0 is the producer.
extern "C" __global__ void producer_consumer(const float* P, const float* V, float* O, int N) {
  __shared__ __align__(128) float ring[stages][keys][columns];
  __shared__ Barrier full[stages], empty[stages];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      init_barrier(full[stage], 1);           // arrivals: the producer thread
      init_barrier(empty[stage], consumers);  // arrivals: every consumer thread
    }
    fence_barrier_init();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tiles = (N + keys - 1) / keys;
  float sum = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % stages;
    const int phase = tile / stages % 2;  // parity of both barriers' phases in this round
    const int rows = min(keys, N - tile * keys);
    if (warp == 0 && lane == 0) {
      const float* source = &V[tile * keys * columns];
      const int bytes = rows * columns * sizeof(float);
      // hole
      wait(empty[stage], phase ^ 1);
      arrive_expect_tx(full[stage], bytes);
      bulk_load(ring[stage], source, bytes, full[stage]);
      // end
    }
    if (warp > 0) {
      // hole
      wait(full[stage], phase);
      for (int key = 0; key < rows; ++key) {
        sum += P[(warp - 1) * N + tile * keys + key] * ring[stage][key][lane];
      }
      arrive(empty[stage]);
      // end
    }
  }
  if (warp > 0) O[(warp - 1) * columns + lane] = sum;
}
