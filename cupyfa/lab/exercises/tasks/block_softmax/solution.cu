// Softmax of the rows of x [rows, n]: a block for each row, maximum and sum in shared memory.

constexpr int threads = 64;
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);

__device__ float larger(float a, float b) {
  return fmaxf(a, b);
}
__device__ float sum(float a, float b) {
  return a + b;
}

// Combines the x of all threads; shared has an element for each. Every thread gets the result.
template <class Combine>
__device__ float reduce(float x, float* shared, Combine combine) {
  const int thread = threadIdx.x;
  // hole
  shared[thread] = x;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) shared[thread] = combine(shared[thread], shared[thread + half]);
  }
  __syncthreads();  // the result is written
  const float result = shared[0];
  __syncthreads();  // every thread has read it, and shared may be written again
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
