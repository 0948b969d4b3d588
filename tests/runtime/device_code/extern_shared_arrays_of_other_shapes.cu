float* x = SharedMemory<float>();
extern __shared__ char raw2[];
float* y = reinterpret_cast<float*>(raw2) + 1;
float* z = (float*)raw + 2;
float* w = reinterpret_cast<float*>(&raw[12]);
*x = 1, *y = 2, *z = 3, *w = 4;
A[0] = last<float>(0), A[1] = twice(), A[2] = text[0], A[3] = first<float>();
