// Attention of one head over an int8 cache with a scale for each key and each value.

constexpr int d = 8;
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);

// q, out [M, d]. keys, values [N, d]. key_scales, value_scales [N]. lse [M]. One thread per row.
extern "C" __global__ void int8_cache(const float* q, const signed char* keys,
                                      const float* key_scales, const signed char* values,
                                      const float* value_scales, float* out, float* lse, int M,
                                      int N, float scale) {
  const int row = threadIdx.x;
  if (row >= M) return;
  float O[d] = {}, m = -infinity, l = 0;
  for (int n = 0; n < N; ++n) {
    const signed char* K = keys + n * d;
    const signed char* V = values + n * d;
    // hole
    float dot = 0;
    for (int c = 0; c < d; ++c) dot += q[row * d + c] * K[c];
    const float score = scale * key_scales[n] * dot, largest = fmaxf(m, score);
    const float factor = expf(m - largest), p = expf(score - largest);
    m = largest;
    l = l * factor + p;
    for (int c = 0; c < d; ++c) O[c] = O[c] * factor + p * value_scales[n] * V[c];
    // end
  }
  for (int c = 0; c < d; ++c) out[row * d + c] = O[c] / l;
  lse[row] = m + logf(l);
}
