// extern __shared__ float in_a_comment[];
constexpr char text[] = "extern __shared__ float in_a_string[]; {";
template <class T> struct SharedMemory {
  __device__ operator T*() { extern __shared__ int bytes[]; return (T*)bytes; }
};
template <class T> __device__ T last(int i) {
  extern __shared__ T tile[][4];
  return tile[i][3];
}
extern "C" { namespace { extern __shared__ unsigned char raw[]; } }
__device__ float twice() {
  extern __shared__ float2 pairs[];
  return (&pairs[1])->x + sizeof(pairs[0]);
}
template <class T> __device__ T first() {
  extern __shared__ __align__(sizeof(T)) unsigned char its_bytes[];
  T* values = reinterpret_cast<T*>(its_bytes);
  return values[0];
}
