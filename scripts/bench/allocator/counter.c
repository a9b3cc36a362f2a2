/* Counts what torch's CPU allocator holds. Preloaded, it takes the place of c10::alloc_cpu and c10::free_cpu.

   Every storage on the CPU is allocated by c10::alloc_cpu(size_t) and freed by c10::free_cpu(void*), whichever thread
   does it (c10/core/impl/alloc_cpu.cpp). libc10.so and libtorch_cpu.so call both through the dynamic linker. The bytes
   are those that were requested. Memory that libraries allocate for themselves (MKL, oneDNN, gloo) is not counted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define ALLOC _ZN3c109alloc_cpuEm
#define FREE _ZN3c108free_cpuEPv
#define SLOTS ((size_t)1 << 20)

typedef struct { void *address; size_t size; } Block;
typedef struct { int64_t address; int64_t size; } Event; /* size < 0: freed */

static Block blocks[SLOTS]; /* open addressing with linear probing */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t current, peak, num_blocks;
static Event *events;
static int64_t num_events, max_events;

static size_t slot_of(const void *address) {
    return (size_t)(((uintptr_t)address >> 6) * 0x9E3779B97F4A7C15ull >> 44); /* the upper 20 bits */
}

static void record(const void *address, int64_t size) {
    if (num_events < max_events) {
        events[num_events].address = (int64_t)(uintptr_t)address;
        events[num_events].size = size;
    }
    if (max_events) num_events++;
}

static void add(void *address, size_t size) {
    pthread_mutex_lock(&lock);
    if (num_blocks * 2 > (int64_t)SLOTS) abort(); /* probing would become slow, then endless */
    size_t slot = slot_of(address);
    while (blocks[slot].address) slot = (slot + 1) % SLOTS;
    blocks[slot] = (Block){address, size};
    num_blocks++;
    current += (int64_t)size;
    if (current > peak) peak = current;
    record(address, (int64_t)size);
    pthread_mutex_unlock(&lock);
}

static void drop(void *address) {
    pthread_mutex_lock(&lock);
    size_t slot = slot_of(address);
    while (blocks[slot].address && blocks[slot].address != address) slot = (slot + 1) % SLOTS;
    if (blocks[slot].address) {
        current -= (int64_t)blocks[slot].size;
        num_blocks--;
        record(address, -(int64_t)blocks[slot].size);
        /* Move later blocks of the same run into the gap, so that they are still found. */
        size_t gap = slot;
        for (size_t next = (gap + 1) % SLOTS; blocks[next].address; next = (next + 1) % SLOTS) {
            size_t wanted = slot_of(blocks[next].address);
            if ((next - wanted) % SLOTS >= (next - gap) % SLOTS) {
                blocks[gap] = blocks[next];
                gap = next;
            }
        }
        blocks[gap].address = NULL;
    }
    pthread_mutex_unlock(&lock);
}

/* Python loads libc10.so outside of the global scope, so RTLD_NEXT does not find its functions. */
static void *original_of(const char *name) {
    void *library = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) abort();
    return function;
}

void *ALLOC(size_t size) {
    static void *(*original)(size_t);
    if (!original) original = (void *(*)(size_t))original_of("_ZN3c109alloc_cpuEm");
    void *address = original(size);
    if (address) add(address, size);
    return address;
}

void FREE(void *address) {
    static void (*original)(void *);
    if (!original) original = (void (*)(void *))original_of("_ZN3c108free_cpuEPv");
    if (address) drop(address); /* before it is freed: another thread may get the same address at once */
    original(address);
}

int64_t hf_fsdp_allocator_current(void) { return __atomic_load_n(&current, __ATOMIC_SEQ_CST); }
int64_t hf_fsdp_allocator_peak(void) { return __atomic_load_n(&peak, __ATOMIC_SEQ_CST); }
int64_t hf_fsdp_allocator_blocks(void) { return __atomic_load_n(&num_blocks, __ATOMIC_SEQ_CST); }

void hf_fsdp_allocator_reset_peak(void) {
    pthread_mutex_lock(&lock);
    peak = current;
    pthread_mutex_unlock(&lock);
}

/* Record up to `capacity` further allocations and frees. Returns their memory: pairs of address and signed size. */
int64_t *hf_fsdp_allocator_record(int64_t capacity) {
    pthread_mutex_lock(&lock);
    free(events);
    events = capacity ? malloc((size_t)capacity * sizeof(Event)) : NULL;
    max_events = events ? capacity : 0;
    num_events = 0;
    pthread_mutex_unlock(&lock);
    return (int64_t *)events;
}

int64_t hf_fsdp_allocator_num_events(void) { return __atomic_load_n(&num_events, __ATOMIC_SEQ_CST); }
