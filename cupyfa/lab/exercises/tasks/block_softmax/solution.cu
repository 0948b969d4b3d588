// Softmax of each row of x [rows, n]: one block per row reduces the maximum and the sum.

constexpr int threads = 64;
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);

__device__ float larger(float a, float b) {
  return fmaxf(a, b);
}
__device__ float sum(float a, float b) {
  return a + b;
}

// Reduces the x of all threads and returns the result in each. `shared` has one element per thread.
template <class Combine>
__device__ float reduce(float x, float* shared, Combine combine) {
  const int thread = threadIdx.x;
  // hole
  shared[thread] = x;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) shared[thread] = combine(shared[thread], shared[thread + half]);
  }
  __syncthreads();  // wait until the result is written
  const float result = shared[0];
  __syncthreads();  // wait until every thread has read it; then shared may be reused
  return result;
  // end
}

extern "C" __global__ void block_softmax(const float* x, float* y, int n) {
  __shared__ float shared[threads];
  x += blockIdx.x * n;
  y += blockIdx.x * n;

  float largest = -infinity;
  for (int i = threadIdx.x; i < n; i += threads) largest = fmaxf(largest, x[i]);
  largest = reduce(largest, shared, larger);

  float total = 0;
  for (int i = threadIdx.x; i < n; i += threads) total += expf(x[i] - largest);
  total = reduce(total, shared, sum);

  for (int i = threadIdx.x; i < n; i += threads) y[i] = expf(x[i] - largest) / total;
}
