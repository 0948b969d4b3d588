// Simulates cp.async, mbarriers, TMA boxes and wgmma. Included at the end of runtime.cpp.
//
// Each operation executes as late as a device may execute it: a thread's copy in the wait for its
// group, a box in the first wait for its mbarrier phase, a product in the first wait for its group.
// Until then the shadow cells that it will write or read carry a clock that no thread has seen, so
// any access that does not wait is reported as a race, in whatever order the threads run.

namespace {

// ---------------------------------------------------------------------------------------------
// Records

// Must match the declarations in tma.cuh and __init__.py.
struct TensorMap {
  std::uint64_t address;
  std::int64_t row_stride, head_stride, batch_stride;  // bytes
  std::int32_t columns, rows, heads, batch;
  std::int32_t box_rows, box_heads;  // the rows of a head are adjacent in a box
  std::int32_t itemsize;             // bytes
  std::int32_t unused[17];

  int rows_of_box() const { return box_rows * box_heads; }
};
static_assert(sizeof(TensorMap) == 128, "as large as on a device");

constexpr int box_columns = 64;  // for 16-bit numbers
constexpr int row_bytes = 128;
constexpr int chunk_bytes = 16;
constexpr std::uintptr_t pattern_bytes = 1024;  // period of the swizzle
constexpr int warpgroup_size = 128;
constexpr int product_rows = 64;
constexpr int product_bytes = 32;  // bytes along k: 16 numbers of 16 bits, or 32 e4m3 numbers
constexpr int product_depth = 16;  // in 16-bit numbers
constexpr int max_depth = 32;
constexpr int max_columns = 256;

// A copy between shared memory and a box of an array, or a range of contiguous bytes.
struct Box {
  TensorMap map;
  int column, row, head, batch;
  unsigned char* shared;
  int thread;  // the thread that started the copy
  Place place;
  unsigned char* memory = nullptr;  // nullptr for a box
  std::size_t count = 0;            // number of bytes from `memory` on

  std::size_t bytes() const {
    return memory != nullptr ? count : static_cast<std::size_t>(map.rows_of_box()) * row_bytes;
  }
};

// A cp.async of up to 16 bytes that is still in flight.
struct Copy {
  Copy* next;
  unsigned char* shared;
  const unsigned char* global;
  std::size_t bytes;  // the remaining bytes are zeros
  std::uint64_t group;
  Place place;
};

// A box load that is still in flight.
struct Load {
  Load* next;
  Box box;
};

struct Store {
  Store* next;
  bool grouped;
  Box box;
};

struct PhaseBarrier {
  std::uintptr_t address;
  std::uint64_t word;  // contents of the barrier in shared memory
  int maker;
  bool published;
  int arrivals;  // expected arrivals per phase
  int missing;   // arrivals that this phase still expects
  long bytes;    // bytes that this phase still expects
  std::uint64_t phase;
  unsigned waiting[max_warps];
  Load* loads;                  // loads in flight, oldest first
  Box landed;                   // the last box loaded
  Clock past[max_components];   // clocks of the threads that have arrived
  Clock known[max_components];  // `past` at the end of the previous phase
};

// The accumulator D of successive products; threads receive it when they wait for the products.
struct Sums {
  Sums* next;
  int columns;
  std::uint64_t last;         // number of the last product
  Place place;                // of the last product
  std::uint64_t taken[2];     // bit mask of threads whose D is held here
  std::uint64_t returned[2];  // bit mask of threads that have received D
  float* d[warpgroup_size];   // address of each thread's own D
  float values[product_rows * max_columns];
};

// A shared-memory operand: the address of its first element, before swizzling.
struct Operand {
  const unsigned char* address;
  int rows;  // 0 for by_rows; for by_columns the rows per box
};

// Operand formats; wgmma.cuh passes these values as integers.
enum class Format { bfloat16, half, e4m3 };

struct Product {
  Product* next;
  std::uint64_t number;
  Operand a;  // its address is nullptr if A is in registers
  Operand b;
  int columns;
  Format format;
  bool added;
  Sums* sums;
  Place place;
  int thread;  // the first thread that issued the product
  int begun;   // number of threads that have issued the product
  Clock past[max_components];
  unsigned registers[warpgroup_size][4];
};

constexpr int kept_groups = 256;

// A call of increase_registers or decrease_registers, made by all threads of a warpgroup together.
struct RegisterCall {
  int count;
  bool increases;
  int threads;  // number of threads that made the call
  int thread;   // the first thread that made the call
  Place place;
};

constexpr int kept_calls = 8;
constexpr int all_registers = 65536;  // per SM
constexpr int max_registers = 255;    // per thread at launch

struct Warpgroup {
  std::uint64_t begun;     // number of products that at least one thread has issued
  std::uint64_t complete;  // number of products that all threads have issued
  std::uint64_t made;      // number of products computed so far
  std::uint64_t groups;
  std::uint64_t ends[kept_groups];  // number of the first product after each recent group
  Product* products;                // products in flight, oldest first
  Sums* sums;
  Place place;  // of the last computed product
  unsigned waiting[warpgroup_size / warp_size];
  RegisterCall registers[kept_calls];  // the first calls of setmaxnreg
};

struct Asynchronous {
  int barrier_count;
  PhaseBarrier barriers[max_phase_barriers];
  Warpgroup warpgroups[max_warps / 4];
  Product* unused_products;
  Sums* unused_sums;
};

Asynchronous& asynchronous(Worker& worker) {
  if (worker.asynchronous == nullptr) {
    worker.asynchronous = static_cast<Asynchronous*>(std::calloc(1, sizeof(Asynchronous)));
  }
  worker.components = std::max(worker.components, boxes_component);
  return *worker.asynchronous;
}

template <class Node>
Node* take_node(Node*& unused) {
  Node* node = unused;
  if (node == nullptr) return static_cast<Node*>(std::calloc(1, sizeof(Node)));
  unused = node->next;
  return node;
}

template <class Node>
void give_node(Node*& unused, Node* node) {
  node->next = unused;
  unused = node;
}

template <class Node>
void append(Node*& list, Node* node) {
  node->next = nullptr;
  Node** end = &list;
  while (*end != nullptr) end = &(*end)->next;
  *end = node;
}

// ---------------------------------------------------------------------------------------------
// Checks and marks of shadow cells

Arena* arena_of(Worker& worker, const void* pointer, std::size_t bytes) {
  std::uintptr_t address = reinterpret_cast<std::uintptr_t>(pointer);
  for (Arena* arena : {&worker.dynamic, &worker.fixed}) {
    if (inside({arena->name, arena->address, arena->bytes}, address, bytes)) return arena;
  }
  return nullptr;
}

Text shared_name(Worker& worker, const void* pointer) {
  const Arena* arena = arena_of(worker, pointer, 1);
  if (arena == nullptr) return format("address %p", pointer);
  std::uintptr_t address = reinterpret_cast<std::uintptr_t>(pointer);
  return format("byte %zu of %s", static_cast<std::size_t>(address - arena->address), arena->name);
}

Arena& shared_arena(Worker& worker, const void* pointer, std::size_t bytes, const char* deed,
                    const Place& place) {
  Arena* arena = arena_of(worker, pointer, bytes);
  if (arena == nullptr) {
    fault(worker, place,
          format("%s %zu bytes at %s, which are not all in the block's shared memory", deed, bytes,
                 shared_name(worker, pointer).chars));
  }
  return *arena;
}

Cell* cells_at(Arena& arena, const void* pointer) {
  return &arena.cells[(reinterpret_cast<std::uintptr_t>(pointer) - arena.address) / cell_bytes];
}

// The clocks that a reader (thread, copy or tensor core) has seen; if it is not a thread, `thread`
// is -1.
struct Reader {
  const Clock* past;
  int thread;
};

inline bool knows(const Reader& reader, Epoch epoch) {
  int other = thread_of(epoch);
  return other == reader.thread || clock_of(epoch) <= reader.past[other / warp_size];
}

[[noreturn]] COLD void fault_unpublished(Worker& worker, const Arena& arena, const Touch& touch,
                                         int thread, const char* done) {
  fault(worker, touch.place,
        format("%s %s byte %zu of %s without fence_proxy_async, but copies or tensor cores "
               "access it next",
               thread_name(worker, thread).chars, done,
               static_cast<std::size_t>(touch.address - arena.address), arena.name));
}

// Returns whether a thread has executed the proxy fence after an access.
inline bool is_published(const Worker& worker, Epoch access) {
  int thread = thread_of(access);
  return thread >= max_threads || clock_of(access) <= worker.floor ||
         clock_of(access) <= worker.fibers[thread].published;
}

// Checks that an asynchronous operation may read these bytes.
inline void check_reading(Worker& worker, Arena& arena, const unsigned char* pointer,
                          std::size_t bytes, const Reader& reader, const Place& place) {
  const Cell* cell = cells_at(arena, pointer);
  for (std::size_t i = 0; i < bytes / cell_bytes; ++i, ++cell) {
    bool good = clock_of(cell->writer) > worker.floor && knows(reader, cell->writer) &&
                knows(reader, cell->updater) && is_published(worker, cell->writer);
    if (__builtin_expect(good, 1)) continue;
    Touch touch{Access::read, reinterpret_cast<std::uintptr_t>(pointer) + i * cell_bytes,
                cell_bytes, place};
    if (clock_of(cell->writer) <= worker.floor) fault_uninitialised(worker, arena, touch);
    if (!knows(reader, cell->writer)) fault_race(worker, arena, touch, cell->writer, "wrote");
    if (!knows(reader, cell->updater)) fault_race(worker, arena, touch, cell->updater, "updated");
    fault_unpublished(worker, arena, touch, thread_of(cell->writer), "wrote");
  }
}

inline void mark_reading(Arena& arena, const unsigned char* pointer, std::size_t bytes,
                         Epoch mark) {
  Cell* cell = cells_at(arena, pointer);
  for (std::size_t i = 0; i < bytes / cell_bytes; ++i, ++cell) {
    if (cell->readers[0] == mark || cell->readers[1] == mark) continue;
    cell->readers[1] = cell->readers[0];
    cell->readers[0] = mark;
  }
}

// Replaces the marks of a read in flight with the epoch `done` at which the read ended.
inline void end_reading(Arena& arena, const unsigned char* pointer, std::size_t bytes, Epoch mark,
                        Epoch done) {
  Cell* cell = cells_at(arena, pointer);
  for (std::size_t i = 0; i < bytes / cell_bytes; ++i, ++cell) {
    if (cell->readers[0] == mark) {
      cell->readers[0] = done;
    } else if (cell->readers[1] == mark) {
      cell->readers[1] = done;
    } else {
      cell->readers[1] = cell->readers[0];
      cell->readers[0] = done;
    }
  }
}

void mark_writing(Arena& arena, const unsigned char* pointer, std::size_t bytes, Epoch mark) {
  std::fill_n(cells_at(arena, pointer), bytes / cell_bytes, Cell{mark, 0, {0, 0}});
}

// ---------------------------------------------------------------------------------------------
// Copies of 16 bytes

void check_copy(Worker& worker, const void* shared, const void* global, int bytes,
                const Place& place) {
  if (bytes < 0 || bytes > chunk_bytes) {
    fault(worker, place, format("calls cp_async for less than 0 or more than 16 bytes"));
  }
  if ((reinterpret_cast<std::uintptr_t>(shared) | reinterpret_cast<std::uintptr_t>(global)) %
          chunk_bytes !=
      0) {
    fault(worker, place, format("calls cp_async with an address that is not a multiple of 16"));
  }
  // An empty copy may have a source address far outside the tensor.
  if (arena_of(worker, shared, 1) == nullptr ||
      (bytes > 0 && arena_of(worker, global, 1) != nullptr)) {
    fault(worker, place,
          format("calls cp_async with addresses that are not in shared and global memory"));
  }
}

// Starts a copy. Reports invalid accesses here, even if no thread waits for the copy.
void begin_copy(Worker& worker, void* shared, const void* global, int bytes, const Place& place) {
  Fiber& fiber = *worker.fiber;
  check_copy(worker, shared, global, bytes, place);
  if (bytes > 0) check<Access::read>(global, static_cast<std::size_t>(bytes), place);
  check<Access::announcement>(shared, chunk_bytes, place);
  Arena& arena = *arena_of(worker, shared, chunk_bytes);
  auto* to = static_cast<unsigned char*>(shared);
  mark_writing(arena, to, chunk_bytes, epoch_of(unfinished, copies_component));
  Copy* copy = take_node(worker.unused_copies);
  *copy = {nullptr,
           to,
           static_cast<const unsigned char*>(global),
           static_cast<std::size_t>(bytes),
           fiber.copy_groups,
           place};
  *fiber.copies_end = copy;
  fiber.copies_end = &copy->next;
}

void land_copy(Worker& worker, const Copy& copy) {
  Arena& arena = *arena_of(worker, copy.shared, chunk_bytes);
  if (copy.bytes > 0) {
    check<Access::read>(copy.global, copy.bytes, copy.place);
    std::memcpy(copy.shared, copy.global, copy.bytes);
  }
  std::memset(copy.shared + copy.bytes, 0, chunk_bytes - copy.bytes);
  Epoch now = worker.warp->clock << clock_shift | static_cast<Epoch>(worker.fiber->index);
  mark_writing(arena, copy.shared, chunk_bytes, now);
}

void land_copies(Worker& worker, unsigned pending) {
  Fiber& fiber = *worker.fiber;
  while (Copy* copy = fiber.copies) {
    if (copy->group + pending >= fiber.copy_groups) return;
    land_copy(worker, *copy);
    fiber.copies = copy->next;
    if (fiber.copies == nullptr) fiber.copies_end = &fiber.copies;
    give_node(worker.unused_copies, copy);
  }
}

// ---------------------------------------------------------------------------------------------
// mbarriers

// Returns the clock of an mbarrier's box loads, which counts phases.
Clock phase_clock(const Worker& worker, const PhaseBarrier& barrier) {
  return worker.floor + 1 + barrier.phase;
}

int component_of(const Worker& worker, const PhaseBarrier& barrier) {
  return boxes_component + static_cast<int>(&barrier - worker.asynchronous->barriers);
}

PhaseBarrier* find_phase_barrier(Worker& worker, const void* pointer) {
  if (worker.asynchronous == nullptr) return nullptr;
  Asynchronous& all = *worker.asynchronous;
  for (int i = 0; i < all.barrier_count; ++i) {
    if (all.barriers[i].address == reinterpret_cast<std::uintptr_t>(pointer)) {
      return &all.barriers[i];
    }
  }
  return nullptr;
}

void check_barrier_address(Worker& worker, const void* pointer, const char* operation,
                           const Place& place) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % sizeof(std::uint64_t) != 0) {
    fault(worker, place,
          format("calls %s on a barrier at %s, which is not a multiple of 8", operation,
                 shared_name(worker, pointer).chars));
  }
  if (arena_of(worker, pointer, sizeof(std::uint64_t)) == nullptr) {
    fault(worker, place, format("calls %s on a barrier that is not in shared memory", operation));
  }
}

PhaseBarrier& phase_barrier(Worker& worker, const void* pointer, const char* operation,
                            const Place& place) {
  check_barrier_address(worker, pointer, operation, place);
  PhaseBarrier* barrier = find_phase_barrier(worker, pointer);
  if (barrier == nullptr) {
    fault(worker, place,
          format("calls %s on a barrier at %s, which init_barrier has not initialised", operation,
                 shared_name(worker, pointer).chars));
  }
  check<Access::atomic>(pointer, sizeof(std::uint64_t), place);
  if (*static_cast<const std::uint64_t*>(pointer) != barrier->word) {
    fault(worker, place,
          format("calls %s on the barrier at %s, which has been overwritten", operation,
                 shared_name(worker, pointer).chars));
  }
  return *barrier;
}

void make_phase_barrier(Worker& worker, void* pointer, int arrivals, const Place& place) {
  check_barrier_address(worker, pointer, "init_barrier", place);
  if (arrivals < 1 || arrivals >= 1 << 20) {
    fault(worker, place,
          format("initialises a barrier for %d arrivals; choose 1 or more", arrivals));
  }
  if (find_phase_barrier(worker, pointer) != nullptr) {
    fault(worker, place,
          format("initialises a barrier at %s, where one already exists",
                 shared_name(worker, pointer).chars));
  }
  Asynchronous& all = asynchronous(worker);
  if (all.barrier_count == max_phase_barriers) {
    fault(worker, place, format("initialises more than %d barriers", max_phase_barriers));
  }
  check<Access::write>(pointer, sizeof(std::uint64_t), place);
  PhaseBarrier& barrier = all.barriers[all.barrier_count++];
  worker.components = boxes_component + all.barrier_count;
  barrier = PhaseBarrier{};
  barrier.address = reinterpret_cast<std::uintptr_t>(pointer);
  barrier.word = 0xba881e8000000000u | static_cast<unsigned>(all.barrier_count);
  std::memcpy(pointer, &barrier.word, sizeof barrier.word);
  barrier.maker = worker.fiber->index;
  barrier.arrivals = barrier.missing = arrivals;
}

void publish_phase_barriers(Worker& worker) {
  if (worker.asynchronous == nullptr) return;
  Asynchronous& all = *worker.asynchronous;
  for (int i = 0; i < all.barrier_count; ++i) {
    if (all.barriers[i].maker == worker.fiber->index) all.barriers[i].published = true;
  }
}

void wake(Worker& worker, unsigned* waiting, int first_warp, int warps) {
  for (int w = 0; w < warps; ++w) {
    make_ready(worker, first_warp + w, waiting[w]);
    waiting[w] = 0;
  }
}

void end_phase_if_done(Worker& worker, PhaseBarrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0 || barrier.loads != nullptr) return;
  join(barrier.known, barrier.past, worker.components);
  barrier.known[component_of(worker, barrier)] = phase_clock(worker, barrier);
  barrier.missing = barrier.arrivals;
  ++barrier.phase;
  wake(worker, barrier.waiting, 0, worker.warp_count);
}

void arrive_at(Worker& worker, PhaseBarrier& barrier, int bytes, const char* operation,
               const Place& place) {
  constexpr long most_bytes = (1 << 20) - 1;
  if (barrier.missing == 0) {
    fault(worker, place,
          format("calls %s on the barrier at %s, where all %d arrivals of its phase %d came and "
                 "%ld bytes are under way",
                 operation, shared_name(worker, reinterpret_cast<void*>(barrier.address)).chars,
                 barrier.arrivals, static_cast<int>(barrier.phase % 2), barrier.bytes));
  }
  barrier.bytes += bytes;
  if (bytes < 0 || barrier.bytes > most_bytes) {
    fault(worker, place,
          format("calls %s for %d bytes; a phase of a barrier expects at most %ld", operation,
                 bytes, most_bytes));
  }
  add_past(worker, barrier.past);
  --barrier.missing;
  end_phase_if_done(worker, barrier);
  if (barrier.missing == 0) wake(worker, barrier.waiting, 0, worker.warp_count);
  take_turn(worker);
}

void land_loads(Worker& worker, PhaseBarrier& barrier);

// Adds this lane to `waiting` and runs other threads until this lane is woken.
void wait_beside(Worker& worker, unsigned& waiting, const char* operation, const Place& place) {
  Fiber& fiber = *worker.fiber;
  let_go(worker, fiber);
  fiber.barrier = -1;
  waiting |= 1u << fiber.lane;
  wait_in(worker, operation, place);
}

void wait_for_phase(Worker& worker, PhaseBarrier& barrier, int phase, const Place& place) {
  Fiber& fiber = *worker.fiber;
  while (static_cast<int>(barrier.phase % 2) == phase) {
    if (barrier.missing == 0 && barrier.loads != nullptr) {
      land_loads(worker, barrier);
      end_phase_if_done(worker, barrier);
      continue;
    }
    fiber.awaited = static_cast<int>(&barrier - worker.asynchronous->barriers);
    fiber.phase = phase;
    wait_beside(worker, barrier.waiting[fiber.warp], "wait", place);
    fiber.awaited = -1;
  }
  know_past(worker, barrier.known);
  take_turn(worker);
}

// ---------------------------------------------------------------------------------------------
// TMA

void check_map(Worker& worker, const TensorMap* map, const char* operation, const Place& place) {
  check<Access::read>(map, sizeof *map, place);
  bool good = map->address % 16 == 0 && map->columns > 0 && map->rows > 0 && map->heads > 0 &&
              map->batch > 0 && map->box_rows > 0 && map->box_rows <= 256 && map->box_heads > 0 &&
              map->box_heads <= 256 && (map->itemsize == 1 || map->itemsize == 2);
  for (std::int64_t stride : {map->row_stride, map->head_stride, map->batch_stride}) {
    good = good && stride % 16 == 0 && stride >= 0;
  }
  for (int word : map->unused) good = good && word == 0;
  if (!good) fault(worker, place, format("calls %s with an invalid tensor map", operation));
}

Box make_box(Worker& worker, const TensorMap* map, const void* shared, const int* coordinates,
             const char* operation, const Place& place) {
  check_map(worker, map, operation, place);
  if (reinterpret_cast<std::uintptr_t>(shared) % pattern_bytes != 0) {
    fault(worker, place,
          format("calls %s with a box at %s; boxes must begin at multiples of %zu", operation,
                 shared_name(worker, shared).chars, pattern_bytes));
  }
  unsigned char* bytes = static_cast<unsigned char*>(const_cast<void*>(shared));
  return {*map,           coordinates[0], coordinates[1],      coordinates[2],
          coordinates[3], bytes,          worker.fiber->index, place};
}

// The part of a box row that lies inside the array: `bytes` bytes at `memory`, which correspond to
// the bytes of the box row from `first` on.
struct Row {
  unsigned char* memory;
  std::size_t first;
  std::size_t bytes;
};

Row row_of(const Box& box, int index) {
  const TensorMap& map = box.map;
  std::int64_t row = std::int64_t{box.row} + index % map.box_rows;
  std::int64_t head = std::int64_t{box.head} + index / map.box_rows;
  bool outside = row < 0 || row >= map.rows || head < 0 || head >= map.heads || box.batch < 0 ||
                 box.batch >= map.batch;
  std::int64_t first = std::max<std::int64_t>(0, -std::int64_t{box.column});
  std::int64_t end =
      std::min<std::int64_t>(row_bytes / map.itemsize, std::int64_t{map.columns} - box.column);
  if (outside || first >= end) return {nullptr, 0, 0};
  std::uint64_t offset = static_cast<std::uint64_t>(row * map.row_stride + head * map.head_stride +
                                                    box.batch * map.batch_stride +
                                                    map.itemsize * (box.column + first));
  return {reinterpret_cast<unsigned char*>(map.address + offset),
          static_cast<std::size_t>(map.itemsize * first),
          static_cast<std::size_t>(map.itemsize * (end - first))};
}

// Swizzles a shared-memory address: XORs bits 4 to 6 with bits 7 to 9.
template <class Byte>
inline Byte* swizzled(Byte* pointer) {
  std::uintptr_t address = reinterpret_cast<std::uintptr_t>(pointer);
  return reinterpret_cast<Byte*>(address ^ (address >> 7 & 7) << 4);
}

void load(const Box& box) {
  if (box.memory != nullptr) {
    std::memcpy(box.shared, box.memory, box.count);
    return;
  }
  for (int index = 0; index < box.map.rows_of_box(); ++index) {
    unsigned char bytes[row_bytes] = {};
    Row row = row_of(box, index);
    if (row.bytes > 0) std::memcpy(bytes + row.first, row.memory, row.bytes);
    for (int at = 0; at < row_bytes; at += chunk_bytes) {
      std::memcpy(swizzled(box.shared + index * row_bytes + at), bytes + at, chunk_bytes);
    }
  }
}

void store(const Box& box) {
  for (int index = 0; index < box.map.rows_of_box(); ++index) {
    unsigned char bytes[row_bytes];
    for (int at = 0; at < row_bytes; at += chunk_bytes) {
      std::memcpy(bytes + at, swizzled(box.shared + index * row_bytes + at), chunk_bytes);
    }
    Row row = row_of(box, index);
    if (row.bytes > 0) std::memcpy(row.memory, bytes + row.first, row.bytes);
  }
}

// Returns contiguous bytes, with the same layout in global and shared memory, as a box.
Box make_bytes(Worker& worker, void* memory, const void* shared, long bytes, const char* operation,
               const Place& place) {
  auto address = reinterpret_cast<std::uintptr_t>(memory);
  if ((address | reinterpret_cast<std::uintptr_t>(shared) | bytes) % chunk_bytes != 0 ||
      bytes <= 0) {
    fault(worker, place,
          format("calls %s with %ld bytes, in memory at %p and in shared memory at %s; all must be "
                 "multiples of %d",
                 operation, bytes, memory, shared_name(worker, shared).chars, chunk_bytes));
  }
  Box box{};
  box.shared = static_cast<unsigned char*>(const_cast<void*>(shared));
  box.thread = worker.fiber->index;
  box.place = place;
  box.memory = static_cast<unsigned char*>(memory);
  box.count = static_cast<std::size_t>(bytes);
  return box;
}

// Floats that were read from shared memory but not yet added to global memory.
struct Addition {
  Addition* next;
  float* memory;
  std::size_t count;
  float values[];
};

void put_off_addition(Fiber& fiber, const Box& box) {
  auto* addition = static_cast<Addition*>(std::calloc(1, sizeof(Addition) + box.count));
  addition->memory = reinterpret_cast<float*>(box.memory);
  addition->count = box.count / sizeof(float);
  std::memcpy(addition->values, box.shared, box.count);
  addition->next = fiber.additions;
  fiber.additions = addition;
}

// Adds atomically, because other workers may add to the same float.
void add_to(float* memory, float value) {
  auto* word = reinterpret_cast<std::uint32_t*>(memory);
  std::uint32_t old = __atomic_load_n(word, __ATOMIC_SEQ_CST), desired;
  do {
    float sum;
    std::memcpy(&sum, &old, sizeof sum);
    sum += value;
    std::memcpy(&desired, &sum, sizeof desired);
  } while (
      !__atomic_compare_exchange_n(word, &old, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
}

// Executes a thread's delayed additions: all of them or, with a seed, a random subset.
void make_additions(Worker& worker, Fiber& fiber, bool all) {
  Addition** link = &fiber.additions;
  while (Addition* addition = *link) {
    if (!all && (!worker.shuffled || next_random(worker.random) % 4 != 0)) {
      link = &addition->next;
      continue;
    }
    for (std::size_t i = 0; i < addition->count; ++i) {
      add_to(addition->memory + i, addition->values[i]);
    }
    *link = addition->next;
    std::free(addition);
  }
}

template <Access access>
void check_array(const Box& box) {
  if (box.memory != nullptr) {
    check<access>(box.memory, box.count, box.place);
    return;
  }
  for (int index = 0; index < box.map.rows_of_box(); ++index) {
    Row row = row_of(box, index);
    if (row.bytes > 0) check<access>(row.memory, row.bytes, box.place);
  }
}

// Returns whether a proxy fence separates an access from a copy that this thread starts: in the
// other thread after the access, or in this thread after the barrier.
inline bool is_fenced(const Worker& worker, Epoch access) {
  return is_published(worker, access) ||
         clock_of(access) <= worker.fiber->fenced[thread_of(access) / warp_size];
}

// Checks that a proxy fence separates the copy from writes to its destination, and from reads: on a
// device a copy may overtake reads that a barrier alone orders before it.
void check_published(Worker& worker, Arena& arena, const Box& box) {
  const Cell* cell = cells_at(arena, box.shared);
  for (std::size_t i = 0; i < box.bytes() / cell_bytes; ++i, ++cell) {
    std::uintptr_t address = reinterpret_cast<std::uintptr_t>(box.shared) + i * cell_bytes;
    Touch touch{Access::write, address, cell_bytes, box.place};
    if (!is_fenced(worker, cell->writer)) {
      fault_unpublished(worker, arena, touch, thread_of(cell->writer), "wrote");
    }
    for (Epoch reader : cell->readers) {
      if (is_fenced(worker, reader)) continue;
      fault_unpublished(worker, arena, touch, thread_of(reader), "read");
    }
  }
}

void begin_load(Worker& worker, const Box& box, PhaseBarrier& barrier) {
  Arena& arena = shared_arena(worker, box.shared, box.bytes(), "loads a box to", box.place);
  if (!barrier.published) {
    fault(worker, box.place,
          format("calls tma_load for a barrier that %s has not published; "
                 "call fence_barrier_init after init_barrier",
                 thread_name(worker, barrier.maker).chars));
  }
  check_array<Access::read>(box);
  check<Access::announcement>(box.shared, box.bytes(), box.place);
  check_published(worker, arena, box);
  mark_writing(arena, box.shared, box.bytes(), epoch_of(unfinished, component_of(worker, barrier)));
  Load* load = static_cast<Load*>(std::calloc(1, sizeof(Load)));
  load->box = box;
  append(barrier.loads, load);
  if (barrier.missing == 0) wake(worker, barrier.waiting, 0, worker.warp_count);
}

void land_loads(Worker& worker, PhaseBarrier& barrier) {
  Epoch now = epoch_of(phase_clock(worker, barrier), component_of(worker, barrier));
  while (Load* first = barrier.loads) {
    const Box& box = first->box;
    load(box);
    mark_writing(*arena_of(worker, box.shared, box.bytes()), box.shared, box.bytes(), now);
    barrier.bytes -= static_cast<long>(box.bytes());
    barrier.landed = box;
    if (barrier.bytes < 0) {
      record(
          worker, box.thread, box.place,
          format("loads a box of %zu bytes, of which its barrier at %s did not expect %ld",
                 box.bytes(), shared_name(worker, reinterpret_cast<void*>(barrier.address)).chars,
                 -barrier.bytes));
      abandon(worker);
    }
    barrier.loads = first->next;
    std::free(first);
  }
}

Epoch stores_mark() {
  return epoch_of(unfinished, stores_component);
}

void begin_store(Worker& worker, const Box& box) {
  Arena& arena = shared_arena(worker, box.shared, box.bytes(), "stores a box from", box.place);
  if (box.memory != nullptr) {
    check_array<Access::atomic>(box);
  } else {
    check_array<Access::write>(box);
  }
  Clock past[max_components];
  std::copy_n(worker.warp->seen, max_components, past);
  add_known(worker, *worker.fiber, past);
  check_reading(worker, arena, box.shared, box.bytes(), {past, worker.fiber->index}, box.place);
  mark_reading(arena, box.shared, box.bytes(), stores_mark());
  Store* store = static_cast<Store*>(std::calloc(1, sizeof(Store)));
  store->box = box;
  append(worker.fiber->stores, store);
}

void end_stores(Worker& worker, const Place& place) {
  Fiber& fiber = *worker.fiber;
  Epoch now = worker.warp->clock << clock_shift | static_cast<Epoch>(fiber.index);
  while (Store* first = fiber.stores) {
    const Box& box = first->box;
    if (!first->grouped) {
      fault(
          worker, place,
          format("waits for a box, stored at %s, that no group holds; call bulk_commit_group first",
                 place_name(worker, box.place).chars));
    }
    if (box.memory != nullptr) {
      put_off_addition(fiber, box);
    } else {
      store(box);
    }
    Arena& arena = *arena_of(worker, box.shared, box.bytes());
    end_reading(arena, box.shared, box.bytes(), stores_mark(), now);
    fiber.stores = first->next;
    std::free(first);
  }
  fiber.published = worker.warp->clock++;  // TMA has read: no fence separates it from itself
  make_additions(worker, fiber, false);
  // Restores the marks of other threads' stores of these bytes: they may still be in flight.
  for (int i = 0; i < worker.threads; ++i) {
    for (Store* store = worker.fibers[i].stores; store != nullptr; store = store->next) {
      const Box& box = store->box;
      mark_reading(*arena_of(worker, box.shared, box.bytes()), box.shared, box.bytes(),
                   stores_mark());
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Operands of products

// Calls `visit` for each 16-byte chunk of an operand, with the chunk's address and position along
// the outer and the inner (k) dimension. Operands by_rows have two chunks of `each` columns per
// row; operands by_columns have one chunk of 8 columns in each of 16 rows.
template <class Visit>
inline void for_chunks(const Operand& operand, int others, int each, Visit visit) {
  if (operand.rows == 0) {
    for (int row = 0; row < others; ++row) {
      const unsigned char* at = operand.address + row * row_bytes;
      visit(swizzled(at), row, 0);
      visit(swizzled(at + chunk_bytes), row, each);
    }
    return;
  }
  for (int column = 0; column < others; column += 8) {
    const unsigned char* at = operand.address + column / box_columns * operand.rows * row_bytes +
                              column % box_columns * 2;
    for (int row = 0; row < product_depth; ++row)
      visit(swizzled(at + row * row_bytes), column, row);
  }
}

std::size_t operand_bytes(const Operand& operand, int others) {
  std::size_t start = reinterpret_cast<std::uintptr_t>(operand.address) % row_bytes;
  if (operand.rows == 0) return others * row_bytes - start;
  std::size_t boxes = (others + box_columns - 1) / box_columns;
  return (boxes - 1) * operand.rows * row_bytes + product_depth * row_bytes;
}

Arena& check_operand(Worker& worker, const Operand& operand, int others, const char* name,
                     const Place& place) {
  std::size_t in_pattern = reinterpret_cast<std::uintptr_t>(operand.address) % pattern_bytes;
  bool good = operand.rows == 0 ? in_pattern < row_bytes && in_pattern % 32 == 0 : in_pattern == 0;
  if (!good || operand.rows < 0 || operand.rows % 8 != 0) {
    fault(
        worker, place,
        format("multiplies with %s at %s; it must begin at a multiple of %zu%s", name,
               shared_name(worker, operand.address).chars, pattern_bytes,
               operand.rows == 0 ? ", or 32, 64 or 96 bytes after one" : ", in boxes of 8 n rows"));
  }
  const unsigned char* start = operand.rows == 0 ? operand.address - in_pattern : operand.address;
  std::size_t bytes = operand_bytes(operand, others) + (operand.address - start);
  return shared_arena(worker, start, bytes, "multiplies with", place);
}

inline float bits_as_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Converts exactly: the exponents differ by 112, except for infinity and NaN.
inline float half_as_float(std::uint16_t bits) {
  std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fff) << 13;
  float scaled = bits_as_float(magnitude) * 0x1p112f;
  std::uint32_t result;
  std::memcpy(&result, &scaled, sizeof result);
  result |= magnitude >= 0x7c00u << 13 ? 0x7f800000u : 0;
  return bits_as_float(result | static_cast<std::uint32_t>(bits & 0x8000) << 16);
}

inline float widened(std::uint16_t bits, bool half) {
  return half ? half_as_float(bits) : bits_as_float(static_cast<std::uint32_t>(bits) << 16);
}

// Converts 4 exponent bits (bias 7) and 3 mantissa bits; all ones are NaN, there is no infinity.
inline float e4m3_as_float(std::uint8_t bits) {
  if ((bits & 0x7f) == 0x7f) return bits_as_float(0x7fc00000);
  std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7f) << 20;
  float value = bits_as_float(magnitude) * 0x1p120f;
  return (bits & 0x80) != 0 ? -value : value;
}

inline int numbers_in_chunk(Format format) {
  return format == Format::e4m3 ? 16 : 8;
}

// Converts 16 bytes to floats; returns the number of floats.
inline int widen_chunk(float (&to)[16], const unsigned char* chunk, Format format) {
  if (format == Format::e4m3) {
    for (int i = 0; i < 16; ++i) to[i] = e4m3_as_float(chunk[i]);
    return 16;
  }
  std::uint16_t bits[8];
  std::memcpy(bits, chunk, sizeof bits);
  bool half = format == Format::half;
  for (int i = 0; i < 8; ++i) to[i] = half ? half_as_float(bits[i]) : widened(bits[i], false);
  return 8;
}

struct Factors {
  float a[product_rows][max_depth];
  float b[max_depth][max_columns];
};

void read_shared(Factors& factors, const Product& product) {
  int each = numbers_in_chunk(product.format);
  if (product.a.address != nullptr) {
    for_chunks(product.a, product_rows, each, [&](const unsigned char* chunk, int row, int column) {
      float values[16];
      int count = widen_chunk(values, chunk, product.format);
      std::memcpy(factors.a[row] + column, values, count * sizeof(float));
    });
  }
  bool by_rows = product.b.rows == 0;
  for_chunks(product.b, product.columns, each,
             [&](const unsigned char* chunk, int column, int row) {
               float values[16];
               int count = widen_chunk(values, chunk, product.format);
               if (by_rows) {
                 for (int i = 0; i < count; ++i) factors.b[row + i][column] = values[i];
               } else {
                 std::memcpy(factors.b[row] + column, values, count * sizeof(float));
               }
             });
}

// The row and column of a thread's first element in a 64 x 16 operand or a 64 x 8 part of D.
inline int row_of_thread(int thread) {
  return thread / warp_size * 16 + thread % warp_size / 4;
}
inline int column_of_thread(int thread) {
  return thread % 4 * 2;
}

void read_registers(Factors& factors, const Product& product) {
  for (int thread = 0; thread < warpgroup_size; ++thread) {
    for (int i = 0; i < 4; ++i) {
      unsigned bits = product.registers[thread][i];
      float* row = factors.a[row_of_thread(thread) + i % 2 * 8];
      if (product.format == Format::e4m3) {
        float* to = row + thread % 4 * 4 + i / 2 * 16;
        for (int j = 0; j < 4; ++j) to[j] = e4m3_as_float(static_cast<std::uint8_t>(bits >> 8 * j));
      } else {
        bool half = product.format == Format::half;
        float* to = row + column_of_thread(thread) + i / 2 * 8;
        to[0] = widened(static_cast<std::uint16_t>(bits), half);
        to[1] = widened(static_cast<std::uint16_t>(bits >> 16), half);
      }
    }
  }
}

typedef float Columns __attribute__((vector_size(64), aligned(4)));
typedef std::int32_t ColumnBits __attribute__((vector_size(64), aligned(4)));
constexpr int width_of_columns = sizeof(Columns) / sizeof(float);
constexpr std::int32_t exponent_bits = 0x7f800000;

// Modifies vectors in place, because returning them requires registers that some processors lack.
inline void keep_bits(Columns& x, std::int32_t bits) {
  x = reinterpret_cast<Columns>(reinterpret_cast<ColumnBits>(x) & bits);
}
inline void keep_largest(Columns& x, const Columns& other) {
  x = x > other ? x : other;
}

// Rounds down to a power of two, but rounds nonzero e4m3 subnormals up to the smallest normal.
inline void keep_powers_of_e4m3(Columns& x) {
  Columns power = x;
  keep_bits(power, exponent_bits);
  keep_largest(power, Columns{} + 0x1p-6f);
  x = x == 0 ? Columns{} : power;
}

// Accumulates e4m3 products as an H100 does. The 32 products and the accumulator are truncated at
// 2^-13 of the largest power of two among them, and their sum at 2^-13 of its own power of two. The
// factors determine a product's power of two, so the product may be almost four times as large.
void add_e4m3_product(Sums& sums, const Factors& factors) {
  for (int row = 0; row < product_rows; ++row) {
    for (int first = 0; first < sums.columns; first += width_of_columns) {
      Columns& sum = *reinterpret_cast<Columns*>(sums.values + row * sums.columns + first);
      Columns top = sum, plain = sum;
      keep_bits(top, exponent_bits);
      for (int k = 0; k < max_depth; ++k) {
        Columns a = Columns{} + factors.a[row][k];
        Columns b = *reinterpret_cast<const Columns*>(factors.b[k] + first);
        keep_powers_of_e4m3(a);
        keep_powers_of_e4m3(b);
        keep_largest(top, a * b);
      }
      Columns per_unit = 0x1p13f / (top == 0 ? Columns{} + 1 : top);
      ColumnBits units = __builtin_convertvector(sum * per_unit, ColumnBits);
      for (int k = 0; k < max_depth; ++k) {
        Columns product =
            factors.a[row][k] * *reinterpret_cast<const Columns*>(factors.b[k] + first);
        units += __builtin_convertvector(product * per_unit, ColumnBits);
        plain += product;
      }
      Columns made = __builtin_convertvector(units, Columns) / per_unit;
      keep_bits(made, ~0x3ff);              // keeps 13 of 23 mantissa bits
      sum = plain == plain ? made : plain;  // propagates NaN
    }
  }
}

// Accumulates products one by one along k and rounds each sum. A device adds sixteen at once, with
// fewer bits.
void add_product(Sums& sums, const Factors& factors) {
  constexpr int width = width_of_columns;
  for (int row = 0; row < product_rows; ++row) {
    float* d = sums.values + row * sums.columns;
    for (int column = 0; column < sums.columns; column += width) {
      Columns sum = *reinterpret_cast<const Columns*>(d + column);
      for (int k = 0; k < product_depth; ++k) {
        sum += factors.a[row][k] * *reinterpret_cast<const Columns*>(factors.b[k] + column);
      }
      *reinterpret_cast<Columns*>(d + column) = sum;
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Issue, computation and wait of products

struct Asked {
  float* d;
  const unsigned* registers;
  Operand a;
  Operand b;
  int columns;
  Format format;
  bool added;
};

Warpgroup& warpgroup_of(Worker& worker, const char* operation, const Place& place) {
  int index = worker.fiber->index / warpgroup_size;
  if (worker.threads < (index + 1) * warpgroup_size) {
    fault(worker, place,
          format("calls %s in a warpgroup of less than %d threads", operation, warpgroup_size));
  }
  return asynchronous(worker).warpgroups[index];
}

int rank_of(const Worker& worker) {
  return worker.fiber->index % warpgroup_size;
}

inline bool has(const std::uint64_t (&threads)[2], int rank) {
  return (threads[rank / 64] >> rank % 64 & 1) != 0;
}
inline void add(std::uint64_t (&threads)[2], int rank) {
  threads[rank / 64] |= std::uint64_t{1} << rank % 64;
}

// Returns the pending Sums that will be written to this thread's accumulator `d`, or nullptr.
Sums* pending_sums(const Warpgroup& group, int rank, const float* d) {
  Sums* sums = group.sums;
  while (sums != nullptr &&
         (!has(sums->taken, rank) || has(sums->returned, rank) || sums->d[rank] != d)) {
    sums = sums->next;
  }
  return sums;
}

Product* new_product(Worker& worker, Warpgroup& group, const Asked& asked, const Place& place) {
  Asynchronous& all = *worker.asynchronous;
  int rank = rank_of(worker);
  Product* product = take_node(all.unused_products);
  product->number = group.begun++;
  product->a = asked.a;
  product->b = asked.b;
  product->columns = asked.columns;
  product->format = asked.format;
  product->added = asked.added;
  product->place = place;
  product->thread = worker.fiber->index;
  product->begun = 0;
  std::fill_n(product->past, max_components, unfinished);
  product->sums = pending_sums(group, rank, asked.d);
  if (product->sums == nullptr) {
    Sums* sums = take_node(all.unused_sums);
    sums->columns = asked.columns;
    std::fill_n(sums->taken, 2, 0);
    std::fill_n(sums->returned, 2, 0);
    append(group.sums, sums);
    product->sums = sums;
  }
  product->sums->last = product->number;
  product->sums->place = place;
  append(group.products, product);
  return product;
}

Product* find_product(const Warpgroup& group, std::uint64_t number) {
  Product* product = group.products;
  while (product != nullptr && product->number != number) product = product->next;
  return product;
}

bool same(const Operand& one, const Operand& other) {
  return one.address == other.address && one.rows == other.rows;
}

COLD void check_together(Worker& worker, const Product& product, const Asked& asked,
                         const Place& place) {
  bool together = same(product.a, asked.a) && same(product.b, asked.b) &&
                  product.columns == asked.columns && product.format == asked.format &&
                  product.added == asked.added;
  if (together) return;
  fault(worker, place,
        format("multiplies other matrices than %s of its warpgroup does at %s; all of its %d "
               "threads begin each product together",
               thread_name(worker, product.thread).chars, place_name(worker, product.place).chars,
               warpgroup_size));
}

inline bool overlap(const float* one, int one_count, const float* other, int other_count) {
  return one < other + other_count && other < one + one_count;
}

void enclose_awaited(Worker& worker, const Warpgroup& group) {
  std::uintptr_t low = ~std::uintptr_t{0}, end = 0;
  int rank = rank_of(worker);
  for (const Sums* sums = group.sums; sums != nullptr; sums = sums->next) {
    if (!has(sums->taken, rank) || has(sums->returned, rank)) continue;
    low = std::min(low, reinterpret_cast<std::uintptr_t>(sums->d[rank]));
    end = std::max(end, reinterpret_cast<std::uintptr_t>(sums->d[rank] + sums->columns / 2));
  }
  worker.awaited_low = worker.fiber->awaited_low = low;
  worker.awaited_end = worker.fiber->awaited_end = end;
}

// Reports a local-memory access that overlaps the D of a product in flight.
void check_awaited(Worker& worker, const Touch& touch) {
  if (touch.address + touch.bytes <= worker.awaited_low) return;
  const Warpgroup& group = worker.asynchronous->warpgroups[worker.fiber->index / warpgroup_size];
  int rank = rank_of(worker);
  for (const Sums* sums = group.sums; sums != nullptr; sums = sums->next) {
    if (!has(sums->taken, rank) || has(sums->returned, rank)) continue;
    auto d = reinterpret_cast<std::uintptr_t>(sums->d[rank]);
    auto end = reinterpret_cast<std::uintptr_t>(sums->d[rank] + sums->columns / 2);
    if (touch.address >= end || touch.address + touch.bytes <= d) continue;
    fault(worker, touch.place,
          format("%s D of a product at %s, which is under way, with no wgmma_wait_group between",
                 verb(touch.access), place_name(worker, sums->place).chars));
  }
}

// Saves a thread's D, and fills its registers with NaN until the thread waits for the product.
void take_d(Worker& worker, Warpgroup& group, Product& product, const Asked& asked,
            const Place& place) {
  Sums& sums = *product.sums;
  int rank = rank_of(worker);
  int count = asked.columns / 2;
  if (has(sums.taken, rank)) {
    if (sums.d[rank] == asked.d && sums.columns == asked.columns) return;
    fault(worker, place, format("multiplies into another D than other threads of its warpgroup"));
  }
  for (const Sums* other = group.sums; other != nullptr; other = other->next) {
    if (!has(other->taken, rank) || has(other->returned, rank)) continue;
    if (overlap(asked.d, count, other->d[rank], other->columns / 2)) {
      fault(worker, place,
            format("multiplies into registers that another product under way is to write"));
    }
  }
  add(sums.taken, rank);
  sums.d[rank] = asked.d;
  for (int i = 0; i < count; ++i) {
    int row = row_of_thread(rank) + i / 2 % 2 * 8;
    int column = i / 4 * 8 + column_of_thread(rank) + i % 2;
    sums.values[row * sums.columns + column] = asked.d[i];
    asked.d[i] = bits_as_float(0x7fffffff);
  }
  enclose_awaited(worker, group);
}

void return_d(Worker& worker, Warpgroup& group, std::uint64_t end, const Place& place) {
  int rank = rank_of(worker);
  Sums** link = &group.sums;
  while (Sums* sums = *link) {
    if (has(sums->taken, rank) && !has(sums->returned, rank) && sums->last < end) {
      // The stack grows downwards, so frames below this one belong to functions that have returned.
      if (static_cast<void*>(sums->d[rank]) < __builtin_frame_address(0)) {
        fault(worker, place,
              format("waits for a product at %s into D of a function that has returned",
                     place_name(worker, sums->place).chars));
      }
      for (int i = 0; i < sums->columns / 2; ++i) {
        int row = row_of_thread(rank) + i / 2 % 2 * 8;
        int column = i / 4 * 8 + column_of_thread(rank) + i % 2;
        sums->d[rank][i] = sums->values[row * sums->columns + column];
      }
      add(sums->returned, rank);
    }
    if (~sums->returned[0] == 0 && ~sums->returned[1] == 0) {
      *link = sums->next;
      give_node(worker.asynchronous->unused_sums, sums);
    } else {
      link = &sums->next;
    }
  }
  enclose_awaited(worker, group);
}

int products_of(const Worker& worker, const Warpgroup& group) {
  return products_component + static_cast<int>(&group - worker.asynchronous->warpgroups);
}

template <class Visit>
void for_operands(Worker& worker, const Product& product, Visit visit) {
  if (product.a.address != nullptr) {
    visit(*arena_of(worker, product.a.address, 1), product.a, product_rows);
  }
  visit(*arena_of(worker, product.b.address, 1), product.b, product.columns);
}

void mark_product(Worker& worker, const Warpgroup& group, const Product& product) {
  Epoch mark = epoch_of(unfinished, products_of(worker, group));
  for_operands(worker, product, [&](Arena& arena, const Operand& operand, int others) {
    for_chunks(operand, others, 8, [&](const unsigned char* chunk, int, int) {
      mark_reading(arena, chunk, chunk_bytes, mark);
    });
  });
}

// Limits a product's clocks to the clocks that this thread has seen. The product reads operands for
// all four warps, so an access precedes the product only if all four warps have seen the access.
void know_less(Worker& worker, Product& product) {
  const Fiber& fiber = *worker.fiber;
  for (int i = max_warps; i < worker.components; ++i) {
    Clock known = std::max(worker.warp->seen[i], fiber.known[i - max_warps]);
    product.past[i] = std::min(product.past[i], known);
  }
  if (fiber.lane != 0) return;
  for (int i = 0; i < worker.warp_count; ++i) {
    Clock known = i == fiber.warp ? worker.warp->clock : worker.warp->seen[i];
    product.past[i] = std::min(product.past[i], known);
  }
}

void check_product(Worker& worker, const Product& product) {
  for_operands(worker, product, [&](Arena& arena, const Operand& operand, int others) {
    for_chunks(operand, others, 8, [&](const unsigned char* chunk, int, int) {
      check_reading(worker, arena, chunk, chunk_bytes, {product.past, -1}, product.place);
    });
  });
}

void begin_product(Worker& worker, const Asked& asked, const Place& place) {
  Fiber& fiber = *worker.fiber;
  Warpgroup& group = warpgroup_of(worker, "multiply", place);
  if (!fiber.begun) {
    fault(worker, place,
          format("multiplies without wgmma_fence, which comes before the first product and "
                 "after each wait"));
  }
  Product* product;
  if (fiber.products == group.begun) {
    if (asked.a.address != nullptr) check_operand(worker, asked.a, product_rows, "A", place);
    check_operand(worker, asked.b, asked.columns, "B", place);
    product = new_product(worker, group, asked, place);
  } else {
    product = find_product(group, fiber.products);
    check_together(worker, *product, asked, place);
  }
  ++fiber.products;
  if (asked.registers != nullptr) {
    std::memcpy(product->registers[rank_of(worker)], asked.registers, 4 * sizeof(unsigned));
  }
  take_d(worker, group, *product, asked, place);
  know_less(worker, *product);
  if (++product->begun < warpgroup_size) return;
  check_product(worker, *product);
  mark_product(worker, group, *product);
  ++group.complete;
  wake(worker, group.waiting, fiber.warp / 4 * 4, warpgroup_size / warp_size);
}

void end_product_group(Worker& worker, const Place& place) {
  Fiber& fiber = *worker.fiber;
  Warpgroup& group = warpgroup_of(worker, "wgmma_commit_group", place);
  std::uint64_t& end = group.ends[fiber.groups % kept_groups];
  if (fiber.groups == group.groups) {
    end = fiber.products;
    ++group.groups;
  } else if (end != fiber.products) {
    fault(worker, place,
          format("ends a group of other products than the rest of its warpgroup; all of its %d "
                 "threads call wgmma_commit_group together",
                 warpgroup_size));
  }
  ++fiber.groups;
  fiber.grouped = fiber.products;
}

void make_product(Worker& worker, Warpgroup& group) {
  Product* product = group.products;
  Factors factors;
  read_shared(factors, *product);
  if (product->a.address == nullptr) read_registers(factors, *product);
  Sums& sums = *product->sums;
  if (!product->added) std::fill_n(sums.values, product_rows * sums.columns, 0.0f);
  if (product->format == Format::e4m3) {
    add_e4m3_product(sums, factors);
  } else {
    add_product(sums, factors);
  }
  int component = products_of(worker, group);
  Epoch done = epoch_of(worker.floor + 1 + product->number, component);
  for_operands(worker, *product, [&](Arena& arena, const Operand& operand, int others) {
    for_chunks(operand, others, 8, [&](const unsigned char* chunk, int, int) {
      end_reading(arena, chunk, chunk_bytes, epoch_of(unfinished, component), done);
    });
  });
  group.place = product->place;
  group.made = product->number + 1;
  group.products = product->next;
  give_node(worker.asynchronous->unused_products, product);
}

void make_products(Worker& worker, Warpgroup& group, std::uint64_t end) {
  if (group.made >= end) return;
  while (group.made < end) make_product(worker, group);
  // Restores the marks of products in flight that read the same bytes.
  for (Product* product = group.products; product != nullptr; product = product->next) {
    if (product->begun == warpgroup_size) mark_product(worker, group, *product);
  }
}

void wait_for_groups(Worker& worker, unsigned pending, const float* d, const Place& place) {
  Fiber& fiber = *worker.fiber;
  Warpgroup& group = warpgroup_of(worker, "wgmma_wait_group", place);
  if (fiber.grouped != fiber.products) {
    fault(worker, place,
          format("waits for products that no group holds; call wgmma_commit_group after the last"));
  }
  std::uint64_t end = fiber.finished_products;
  if (fiber.groups > pending) {
    end = std::max(end, group.ends[(fiber.groups - pending - 1) % kept_groups]);
  }
  while (group.complete < end) {
    wait_beside(worker, group.waiting[fiber.warp % 4], "wgmma_wait_group", place);
  }
  make_products(worker, group, end);
  return_d(worker, group, end, place);
  if (end > fiber.finished_products) {
    Clock& known = fiber.known[products_of(worker, group) - max_warps];
    known = std::max(known, worker.floor + end);
  }
  fiber.finished_products = end;
  fiber.begun = false;
  if (pending_sums(group, rank_of(worker), d) != nullptr) {
    fault(
        worker, place,
        format("waits for D while a product of one of the last %u groups is to write it", pending));
  }
}

// ---------------------------------------------------------------------------------------------
// Fault messages, and checks at the end of a block

const Load* load_to(const PhaseBarrier& barrier, std::uintptr_t address) {
  const Load* load = barrier.loads;
  while (load != nullptr &&
         address - reinterpret_cast<std::uintptr_t>(load->box.shared) >= load->box.bytes()) {
    load = load->next;
  }
  return load;
}

Text box_name(const Worker& worker, const char* what, const Box& box) {
  return format("a box that %s %s at %s", thread_name(worker, box.thread).chars, what,
                place_name(worker, box.place).chars);
}

// Describes the asynchronous operation of an epoch.
Text asynchronous_name(const Worker& worker, Epoch epoch, std::uintptr_t address) {
  int component = thread_of(epoch) / warp_size;
  if (component == copies_component) {
    for (int i = 0; i < worker.threads; ++i) {
      const Copy* copy = worker.fibers[i].copies;
      for (; copy != nullptr; copy = copy->next) {
        if (address - reinterpret_cast<std::uintptr_t>(copy->shared) >= chunk_bytes) continue;
        return format("a copy that %s began with cp_async at %s", thread_name(worker, i).chars,
                      place_name(worker, copy->place).chars);
      }
    }
    return format("a copy of cp_async");
  }
  const Asynchronous& all = *worker.asynchronous;
  if (component >= boxes_component) {
    const PhaseBarrier& barrier = all.barriers[component - boxes_component];
    const Load* load = load_to(barrier, address);
    return box_name(worker, "loads", load != nullptr ? load->box : barrier.landed);
  }
  if (component == stores_component) {
    for (int i = 0; i < worker.threads; ++i) {
      const Store* store = worker.fibers[i].stores;
      for (; store != nullptr; store = store->next) {
        std::uintptr_t start = reinterpret_cast<std::uintptr_t>(store->box.shared);
        if (address - start < store->box.bytes()) return box_name(worker, "stores", store->box);
      }
    }
    return format("a box that is stored");
  }
  const Warpgroup& group = all.warpgroups[component - products_component];
  bool pending = clock_of(epoch) == unfinished && group.products != nullptr;
  return format("a product of warpgroup %d at %s", component - products_component,
                place_name(worker, pending ? group.products->place : group.place).chars);
}

// Names the wait that is missing after an asynchronous operation.
const char* missing_wait(Epoch epoch) {
  int component = thread_of(epoch) / warp_size;
  if (component >= boxes_component) return "wait for its barrier";
  if (component == copies_component) return "cp_async_wait_group of that thread";
  return component == stores_component ? "bulk_wait_group_read" : "wgmma_wait_group";
}

Text awaited_text(Worker& worker, const PhaseBarrier& barrier, const Fiber& waiting) {
  int count = 0;
  for (int i = 0; i < worker.threads; ++i) {
    count += worker.fibers[i].awaited == waiting.awaited;
  }
  int phase = static_cast<int>(barrier.phase % 2);
  return format(
      "%d %s for phase %d of the barrier at %s, at %s; it is in phase %d, %d of %d "
      "arrivals came%s",
      count, count == 1 ? "thread waits" : "threads wait", waiting.phase,
      shared_name(worker, reinterpret_cast<void*>(barrier.address)).chars,
      place_name(worker, waiting.place).chars, phase, barrier.arrivals - barrier.missing,
      barrier.arrivals,
      barrier.bytes == 0 ? "" : format(" and %ld expected bytes are missing", barrier.bytes).chars);
}

const Fiber* first_in_barrier(const Worker& worker) {
  for (int i = 0; i < worker.threads; ++i) {
    const Fiber& fiber = worker.fibers[i];
    if (fiber.operation != nullptr && fiber.barrier >= 0) return &fiber;
  }
  return nullptr;
}

// Reports threads that wait for an mbarrier phase or product that never completes, each mbarrier
// once. Returns whether there is any such thread.
bool report_vain_waits(Worker& worker) {
  if (worker.asynchronous == nullptr) return false;
  Text text = format("waits for ever: ");
  const Fiber* first = nullptr;
  std::uint64_t named = 0;
  for (int i = 0; i < worker.threads; ++i) {
    const Fiber& fiber = worker.fibers[i];
    if (fiber.awaited < 0 || (named >> fiber.awaited & 1) != 0) continue;
    named |= std::uint64_t{1} << fiber.awaited;
    if (first != nullptr) append_text(text, "; ");
    append_text(text,
                awaited_text(worker, worker.asynchronous->barriers[fiber.awaited], fiber).chars);
    if (first == nullptr) first = &fiber;
  }
  for (int i = 0; i < worker.threads && first == nullptr; ++i) {
    const Fiber& fiber = worker.fibers[i];
    const Warpgroup& group = worker.asynchronous->warpgroups[i / warpgroup_size];
    if ((group.waiting[fiber.warp % 4] >> fiber.lane & 1) == 0) continue;
    int start = i / warpgroup_size * warpgroup_size;
    int missing = start;
    while (worker.fibers[missing].products > group.complete) ++missing;
    append_text(text,
                format("a thread waits for products, at %s, that %s of its warpgroup does "
                       "not begin; it %s",
                       place_name(worker, fiber.place).chars, thread_name(worker, missing).chars,
                       whereabouts(worker, worker.fibers[missing]).chars)
                    .chars);
    first = &fiber;
  }
  if (first == nullptr) return false;
  if (const Fiber* other = first_in_barrier(worker)) {
    append_text(text, format("; %s", waiting_text(worker, *other).chars).chars);
  }
  record(worker, first->index, first->place, text, first, frame_of(*first));
  return true;
}

// Reports stores and products that a thread did not wait for before it returned.
void check_left_over(Worker& worker) {
  Fiber& fiber = *worker.fiber;
  if (fiber.stores != nullptr) {
    fault(worker, fiber.stores->box.place,
          format("returns before a box that it stores was read from shared memory; "
                 "call %sbulk_wait_group_read",
                 fiber.stores->grouped ? "" : "bulk_commit_group and "));
  }
  if (fiber.finished_products != fiber.products) {
    const Warpgroup& group = worker.asynchronous->warpgroups[fiber.index / warpgroup_size];
    const Product* product = find_product(group, fiber.finished_products);
    fault(worker, product != nullptr ? product->place : group.place,
          format("returns before its products were waited for; call wgmma_wait_group first"));
  }
}

// Executes the additions that no thread waited for, and reports box loads that no thread waited
// for, which would land in the shared memory of the next block.
void check_left_loads(Worker& worker) {
  for (int i = 0; i < worker.threads; ++i) make_additions(worker, worker.fibers[i], true);
  if (worker.asynchronous == nullptr) return;
  const Asynchronous& all = *worker.asynchronous;
  for (int i = 0; i < all.barrier_count; ++i) {
    if (all.barriers[i].loads == nullptr) continue;
    const Box& box = all.barriers[i].loads->box;
    record(worker, box.thread, box.place,
           format("loads a box that no thread waits for before the block ends"));
    worker.abandoned = true;
    return;
  }
}

// ---------------------------------------------------------------------------------------------
// Registers

const char* name_of(const RegisterCall& call) {
  return call.increases ? "increase_registers" : "decrease_registers";
}

void set_registers(Worker& worker, int count, bool increases, const Place& place) {
  Fiber& fiber = *worker.fiber;
  RegisterCall asked{count, increases, 1, fiber.index, place};
  Warpgroup& group = warpgroup_of(worker, name_of(asked), place);
  int number = fiber.register_calls++;
  if (number >= kept_calls) return;
  RegisterCall& call = group.registers[number];
  if (call.threads++ == 0) {
    call = asked;
  } else if (call.count != count || call.increases != increases) {
    fault(worker, place,
          format("calls %s<%d>, and %s of its warpgroup calls %s<%d> at %s; all threads of a "
                 "warpgroup must make the same call",
                 name_of(asked), count, thread_name(worker, call.thread).chars, name_of(call),
                 call.count, place_name(worker, call.place).chars));
  }
}

// Returns a warpgroup's last setmaxnreg call; nullptr if it made none, or more than kept_calls.
const RegisterCall* last_call(const Worker& worker, const Warpgroup& group) {
  const RegisterCall* last = nullptr;
  for (const RegisterCall& call : group.registers) {
    if (call.threads == 0) break;
    last = &call;
  }
  bool is_kept = last == nullptr || worker.fibers[last->thread].register_calls <= kept_calls;
  return is_kept ? last : nullptr;
}

// Reports warpgroups that hold more registers at the end than the block had at launch: on a device
// an increase would have waited forever.
void check_registers(Worker& worker) {
  if (worker.asynchronous == nullptr || worker.abandoned) return;
  int at_launch = std::min(all_registers / worker.threads, max_registers) / 8 * 8;
  int held = 0;
  const RegisterCall* waiting = nullptr;
  Text counts = format("%s", "");
  for (int first = 0; first < worker.threads; first += warpgroup_size) {
    const Warpgroup& group = worker.asynchronous->warpgroups[first / warpgroup_size];
    const RegisterCall* last = last_call(worker, group);
    if (last != nullptr && last->threads < warpgroup_size) {
      record(worker, last->thread, last->place,
             format("calls %s<%d> with %d threads of its warpgroup; all %d must make the same call",
                    name_of(*last), last->count, last->threads, warpgroup_size));
      worker.abandoned = true;
      return;
    }
    if (last != nullptr && last->increases) waiting = last;
    int count = last != nullptr ? last->count : at_launch;
    append_text(counts, format("%s%d", first == 0 ? "" : ", ", count).chars);
    held += count * std::min(warpgroup_size, worker.threads - first);
  }
  if (waiting == nullptr || held <= at_launch * worker.threads) return;
  record(worker, waiting->thread, waiting->place,
         format("waits forever for registers that the block does not have: threads of its "
                "warpgroups ask for %s, in all %d, and %d threads have at most %d each at the "
                "launch, in all %d; increase_registers to fewer, or decrease_registers of others "
                "to fewer",
                counts.chars, held, worker.threads, at_launch, at_launch * worker.threads));
  worker.abandoned = true;
}

// Returns a clock later than all operations of the last block.
Clock latest_clock(const Worker& worker) {
  Clock latest = worker.floor;
  if (worker.asynchronous == nullptr) return latest;
  const Asynchronous& all = *worker.asynchronous;
  for (int i = 0; i < all.barrier_count; ++i) {
    latest = std::max(latest, phase_clock(worker, all.barriers[i]));
  }
  for (const Warpgroup& group : all.warpgroups) {
    latest = std::max(latest, worker.floor + 1 + group.begun);
  }
  return latest;
}

// Drops copies that no thread waits for. Their data is unused, since any use would have been
// reported as a fault.
void drop_copies(Worker& worker, Fiber& fiber) {
  for (const Copy* copy = fiber.copies; copy != nullptr; copy = copy->next) {
    mark_writing(*arena_of(worker, copy->shared, chunk_bytes), copy->shared, chunk_bytes, 0);
  }
  free_all(fiber.copies);
}

// Discards all pending asynchronous operations before the next block runs.
void forget_asynchronous(Worker& worker) {
  for (int i = 0; i < worker.threads; ++i) {
    drop_copies(worker, worker.fibers[i]);
    free_all(worker.fibers[i].stores);
    free_all(worker.fibers[i].additions);
  }
  if (worker.asynchronous == nullptr) return;
  Asynchronous& all = *worker.asynchronous;
  for (int i = 0; i < all.barrier_count; ++i) free_all(all.barriers[i].loads);
  all.barrier_count = 0;
  for (Warpgroup& group : all.warpgroups) {
    free_all(group.products);
    free_all(group.sums);
    group = Warpgroup{};
  }
}

void free_asynchronous(Worker& worker) {
  forget_asynchronous(worker);
  free_all(worker.unused_copies);
  if (worker.asynchronous == nullptr) return;
  free_all(worker.asynchronous->unused_products);
  free_all(worker.asynchronous->unused_sums);
  std::free(worker.asynchronous);
}

}  // namespace

// ---------------------------------------------------------------------------------------------
// Functions that simulator.h declares and describes

EXPORTED void simulator_begin_copy(void* shared, const void* global, int bytes, const char* file,
                                   int line) {
  begin_copy(*self, shared, global, bytes, {file, line, CALLER});
}

EXPORTED void simulator_commit_copies() {
  ++self->fiber->copy_groups;
}

EXPORTED void simulator_wait_for_copies(unsigned pending) {
  land_copies(*self, pending);
}

EXPORTED void simulator_make_barrier(void* barrier, int arrivals, const char* file, int line) {
  make_phase_barrier(*self, barrier, arrivals, {file, line, CALLER});
}

EXPORTED void simulator_publish_barriers() {
  publish_phase_barriers(*self);
}

EXPORTED void simulator_arrive(void* barrier, int bytes, const char* operation, const char* file,
                               int line) {
  Place place{file, line, CALLER};
  arrive_at(*self, phase_barrier(*self, barrier, operation, place), bytes, operation, place);
}

EXPORTED void simulator_wait(void* barrier, int phase, const char* file, int line) {
  Worker& worker = *self;
  Place place{file, line, CALLER};
  PhaseBarrier& found = phase_barrier(worker, barrier, "wait", place);
  if (phase != 0 && phase != 1) {
    fault(worker, place,
          format("waits for phase %d of a barrier, which has phases 0 and 1", phase));
  }
  wait_for_phase(worker, found, phase, place);
}

EXPORTED void simulator_load_box(void* shared, const void* map, void* barrier,
                                 const int* coordinates, const char* file, int line) {
  Worker& worker = *self;
  Place place{file, line, CALLER};
  Box box =
      make_box(worker, static_cast<const TensorMap*>(map), shared, coordinates, "tma_load", place);
  begin_load(worker, box, phase_barrier(worker, barrier, "tma_load", place));
}

EXPORTED void simulator_store_box(const void* map, const void* shared, const int* coordinates,
                                  const char* file, int line) {
  Worker& worker = *self;
  begin_store(worker, make_box(worker, static_cast<const TensorMap*>(map), shared, coordinates,
                               "tma_store", {file, line, CALLER}));
}

EXPORTED void simulator_load_bytes(void* shared, const void* memory, int bytes, void* barrier,
                                   const char* file, int line) {
  Worker& worker = *self;
  Place place{file, line, CALLER};
  Box box = make_bytes(worker, const_cast<void*>(memory), shared, bytes, "bulk_load", place);
  begin_load(worker, box, phase_barrier(worker, barrier, "bulk_load", place));
}

EXPORTED void simulator_add_floats(float* memory, const float* shared, int count, const char* file,
                                   int line) {
  Worker& worker = *self;
  long bytes = long{count} * static_cast<long>(sizeof(float));
  begin_store(worker, make_bytes(worker, memory, shared, bytes, "bulk_add", {file, line, CALLER}));
}

EXPORTED void simulator_commit_stores() {
  for (Store* store = self->fiber->stores; store != nullptr; store = store->next) {
    store->grouped = true;
  }
}

EXPORTED void simulator_end_stores(const char* file, int line) {
  end_stores(*self, {file, line, CALLER});
}

EXPORTED void simulator_make_additions() {
  make_additions(*self, *self->fiber, true);
}

// Advances the warp's clock; the thread's earlier accesses count as published.
EXPORTED void simulator_fence_for_copies() {
  Worker& worker = *self;
  worker.fiber->published = worker.warp->clock++;
  std::copy_n(worker.warp->seen, max_warps, worker.fiber->fenced);
  publish_phase_barriers(worker);
}

EXPORTED void simulator_fence_registers(const char* file, int line) {
  warpgroup_of(*self, "wgmma_fence", {file, line, CALLER});
  self->fiber->begun = true;
}

EXPORTED void simulator_multiply(float* d, const unsigned* registers, const void* a, const void* b,
                                 int rows, int columns, int format, bool added, const char* file,
                                 int line) {
  Operand left{static_cast<const unsigned char*>(a), 0};
  Operand right{static_cast<const unsigned char*>(b), rows};
  Asked asked{d, registers, left, right, columns, static_cast<Format>(format), added};
  begin_product(*self, asked, {file, line, CALLER});
}

EXPORTED void simulator_commit_products(const char* file, int line) {
  end_product_group(*self, {file, line, CALLER});
}

EXPORTED void simulator_wait_for_products(unsigned pending, const float* d, const char* file,
                                          int line) {
  wait_for_groups(*self, pending, d, {file, line, CALLER});
}

EXPORTED void simulator_set_registers(int count, bool increases, const char* file, int line) {
  set_registers(*self, count, increases, {file, line, CALLER});
}

// Returns the lane that elect.sync selects, which is the same throughout a launch.
EXPORTED int simulator_elected_lane() {
  unsigned lane = self->shuffled ? self->launch->request->seed % warp_size : 0;
  return (self->warp->lanes >> lane & 1) != 0 ? static_cast<int>(lane) : 0;
}
