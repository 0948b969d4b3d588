#include <ptx/wmma.cuh>
#include <ptx/named_barrier.cuh>
#include <ptx/mma.cuh>
#include <ptx/cp_async.cuh>
extern "C" __global__ void test(const __half* a, float* out) {
  __shared__ __align__(16) __half tile[32][8];
  cp_async(tile[threadIdx.x], a, threadIdx.x % 17);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncwarp();
  unsigned r[4], s[4];
  ldmatrix(r, tile[threadIdx.x]);
  ldmatrix_trans(s, tile[threadIdx.x]);
  float d4[4] = {};
  multiply_add<__half>(d4, r, s[0], pack<__half>(out[0], out[1]));
  out[threadIdx.x] = d4[0] + d4[1] + d4[2] + d4[3];
  barrier_sync(1, 32);
  barrier_arrive(2, 64);
  Accumulator d{};
  multiply_add(d, load_a(a, 16), load_b_rows(a, 16));
  multiply_add(d, load_a(a, 16), load_b_columns(a, 16));
  store(out, 16, d);
}
