// Greedy decoding of a whole model at batch 1 in one launch: one CTA per SM.
//
// A producer thread streams the weights that its CTA multiplies, in the order of the schedule,
// through stages of shared memory by bulk asynchronous copies. It never waits for activations, so
// loads run ahead across the borders of operators, layers and tokens. The consumer warps run the
// instructions of the schedule; they wait for activations of other CTAs by counters in global
// memory, which signal with release and are read with acquire.
//
// Every wait has a time limit. The first one that expires writes a fault record and stops all
// waits: the kernel then ends within the time of its remaining instructions.
//
// The host defines: HIDDEN, INNER, HEADS (of keys), GROUP (query heads of a key head), DIM,
// VOCABULARY, LAYERS, SPLITS, SPLIT_KEYS, STAGES, STAGE_BYTES, INSTRUCTIONS, EPSILON, SCALE (with
// log2(e)), EMBEDDING_SCALE, ACTIVATION, ADD_ONE, HAS_BIAS, HAS_QK_NORM, WARPS (of a team), GROUPS
// (teams), and for measurements SKIP_LOADS, SKIP_MATH, PROFILE.
//
// The code is kept small: a layer runs all of it, and the instruction caches are small too.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int Q_WIDTH = HEADS * GROUP * DIM;
constexpr int KV_WIDTH = HEADS * DIM;
constexpr int QKV_WIDTH = Q_WIDTH + 2 * KV_WIDTH;
// Threads that multiply a tile together.
constexpr int TEAM = 32 * WARPS;
constexpr int CONSUMERS = TEAM * GROUPS;
// Rows whose partial sums a CTA keeps before it adds them up.
constexpr int PARTS = 128;
constexpr int PART_WARPS = PARTS / 32;
constexpr int MOST_ROWS = 8;
constexpr int COUNTER_STRIDE = 32;
constexpr int MOST_STOPS = 16;
constexpr int KEY_LANES = DIM / 8;
constexpr int KEY_TEAMS = CONSUMERS / KEY_LANES;
// Keys that a lane loads together.
constexpr int KEYS_AHEAD = 2;
constexpr float NEGATIVE = -1e30f;

static_assert(STAGES % GROUPS == 0, "a slot must belong to one team");

enum Op { QKV, ATTEND, O, GATED, DOWN, HEAD, NEXT, OPS };
enum Fault { NONE, COUNTER_LATE, STAGE_LATE, SLOT_LATE, LOAD_LATE, UNKNOWN_SM };
// Of a profile: the time until each mark since the one before.
enum Mark { WAIT, INPUTS, TILES, SYNC, STORE, SIGNAL, STARVED, MARKS = 8 };
// Entries of the state of the sequence, as in the kernels of several launches, and the last token.
enum StateEntry { SLOT, STEP, IS_FINISHED, START, PADDING, CALL, TOKEN };

struct Instruction {
    int op, layer, first, count, wait, arrivals, signal, unused;
};

struct Layer {
    const u16 *attention_gain, *mlp_gain, *q_gain, *k_gain;
    const u16 *q, *k, *v, *o, *gate, *up, *down;
    const u16 *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
    u16 *keys, *values;
};

struct Best {
    float value;
    int token;
};

struct Parameters {
    const Instruction* instructions;
    const Layer* layers;
    const u16 *embedding, *norm, *head;
    const float *cosines, *sines;
    float *qkv, *partial, *lse, *middle, *output, *logits;
    u16* gated;
    Best* bests;
    u32* counters;
    int* state;
    const int* stops;
    long long* tokens;
    u32 *fault, *host_fault;
    u64* profile;
    u64 patience;
    int steps, length, window, kept;
    // Stages in flight at most.
    int ahead;
};

struct Shared {
    alignas(16) Instruction instructions[INSTRUCTIONS];
    alignas(16) Layer layers[LAYERS];
    alignas(16) float parts[2][PARTS][WARPS];
    alignas(16) float attended[CONSUMERS / 32][DIM + 2];
    u64 full[STAGES], empty[STAGES];
    float squares[WARPS];
    Best bests[CONSUMERS / 32];
    int stops[MOST_STOPS];
    int token, slot, step, is_finished;
    u64 profile[PROFILE ? OPS : 1][MARKS];
    volatile int is_aborted;
    // Whether all consumers leave behind the barrier of a wait; of two waits, as one may be ahead.
    int leaves[2];
    volatile int stops_loads;
};

// Memory and barriers

__device__ __forceinline__ u32 sm_of_cta() {
    u32 sm;
    asm("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 address_of(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(count)
                 : "memory");
}

__device__ __forceinline__ bool is_complete(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void sync_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

__device__ __forceinline__ u32 acquired(const u32* p) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

__device__ __forceinline__ u32 relaxed(const u32* p) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

// Of activations: past L1, which other CTAs' writes do not reach.
__device__ __forceinline__ float4 load4(const float* p) {
    return __ldcg(reinterpret_cast<const float4*>(p));
}

__device__ __forceinline__ uint4 load8(const u16* p) {
    return __ldcg(reinterpret_cast<const uint4*>(p));
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float wide(u16 x) { return __uint_as_float(u32(x) << 16); }

__device__ __forceinline__ u16 narrow(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void unpack(uint4 from, float (&to)[8]) {
    to[0] = low(from.x), to[1] = high(from.x), to[2] = low(from.y), to[3] = high(from.y);
    to[4] = low(from.z), to[5] = high(from.z), to[6] = low(from.w), to[7] = high(from.w);
}

__device__ __forceinline__ void load_floats(const float* from, float (&to)[8]) {
    float4 a = load4(from), b = load4(from + 4);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// Waits with a limit

__device__ __noinline__ void report(const Parameters& p, Shared& s, u32 code, int place, int step,
                                    u32 seen, u32 wanted) {
    s.is_aborted = 1;
    if (atomicCAS(p.fault, 0u, code) != 0u) return;
    const u32 record[6] = {sm_of_cta(), u32(place), u32(step), seen, wanted, code};
    for (int i = 0; i < 6; ++i) *reinterpret_cast<volatile u32*>(p.host_fault + 1 + i) = record[i];
    __threadfence_system();
    *reinterpret_cast<volatile u32*>(p.host_fault) = code;
}

__device__ __forceinline__ bool is_given_up(const Parameters& p, Shared& s, u32 round) {
    if (s.is_aborted) return true;
    if (round % 64 == 63 && relaxed(p.fault) != 0u) s.is_aborted = 1;
    return s.is_aborted;
}

__device__ __noinline__ void await_long(const Parameters& p, Shared& s, u32 barrier, u32 parity,
                                        u32 code, int place) {
    const long long begin = clock64();
    for (u32 round = 0; !is_complete(barrier, parity); ++round) {
        if (is_given_up(p, s, round) || (code == SLOT_LATE && s.stops_loads)) return;
        if (u64(clock64() - begin) > p.patience)
            return report(p, s, code, place, 0, barrier, parity);
    }
}

__device__ __forceinline__ void await_barrier(const Parameters& p, Shared& s, u32 barrier,
                                              u32 parity, u32 code, int place) {
    if (!is_complete(barrier, parity)) await_long(p, s, barrier, parity, code, place);
}

__device__ __noinline__ void await_counter(const Parameters& p, Shared& s, int counter, u32 wanted,
                                           int place, int step) {
    const u32* at = p.counters + counter * COUNTER_STRIDE;
    const long long begin = clock64();
    for (u32 round = 0;; ++round) {
        const u32 seen = acquired(at);
        if (seen >= wanted || is_given_up(p, s, round)) return;
        if (u64(clock64() - begin) > p.patience)
            return report(p, s, COUNTER_LATE, place, step, seen, wanted);
    }
}

// What a warp has stored is seen by whoever sees the counter.
__device__ __forceinline__ void signal(const Parameters& p, int counter) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(
                         p.counters + counter * COUNTER_STRIDE)
                     : "memory");
    }
}

// Tiles

template <int K>
struct Tiling {
    static constexpr int VECTORS = K / 8;
    static constexpr int EACH = (VECTORS + TEAM - 1) / TEAM;
    static constexpr int FIT = STAGE_BYTES / (2 * K);
    static constexpr int ROWS = FIT < MOST_ROWS ? FIT : MOST_ROWS;
    static constexpr int PADDED = ROWS > 4 ? 8 : ROWS > 2 ? 4 : ROWS;
    // Outputs whose partial sums are kept together; a gated one has two rows.
    static constexpr int SEGMENT = PARTS / ROWS * ROWS;
    static constexpr int PAIRS = PARTS / 2 / ROWS * ROWS;
    static_assert(K % 8 == 0 && ROWS >= 1, "a row of weights must fit in a stage");
};

struct Place {
    u32 slot, parity;
    __device__ __forceinline__ void advance(u32 count) {
        slot += count;
        while (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
};

struct Producer {
    const Parameters& p;
    Shared& s;
    char* ring;
    u64 policy;
    Place at, landed;
    u32 issued;

    // Load some rows into the next stage; they may end in one matrix and go on in another.
    __device__ __forceinline__ bool load(const Instruction& one, int first, int count, int side,
                                         int columns, int place) {
        const u32 full = address_of(&s.full[at.slot]);
        await_barrier(p, s, address_of(&s.empty[at.slot]), at.parity ^ 1, SLOT_LATE, place);
        // More in flight than memory needs only lengthens its queues, for activations as well.
        if (issued >= u32(p.ahead)) {
            await_barrier(p, s, address_of(&s.full[landed.slot]), landed.parity, LOAD_LATE, place);
            landed.advance(1);
        }
        if (s.is_aborted || s.stops_loads) return false;
        if (SKIP_LOADS) {
            arrive(full);
        } else {
            expect(full, count * 2 * columns);
            u32 to = address_of(ring) + at.slot * STAGE_BYTES;
            while (count > 0) {
                int run = count, row = first;
                const u16* matrix = matrix_of(one, side, row, run);
                copy(to, matrix + size_t(row) * columns, run * 2 * columns, full, policy);
                to += run * 2 * columns, first += run, count -= run;
            }
        }
        at.advance(1);
        ++issued;
        return true;
    }

    // The matrix of a row, which row of it that is, and how many of `run` rows it has from there.
    __device__ __forceinline__ const u16* matrix_of(const Instruction& one, int side, int& row,
                                                    int& run) const {
        const Layer& layer = s.layers[one.layer];
        if (one.op == HEAD) return p.head;
        if (one.op == O) return layer.o;
        if (one.op == DOWN) return layer.down;
        if (one.op == GATED) return side ? layer.up : layer.gate;
        const u16* matrix = layer.q;
        int end = Q_WIDTH;
        if (row >= Q_WIDTH + KV_WIDTH) {
            matrix = layer.v, row -= Q_WIDTH + KV_WIDTH, end = KV_WIDTH;
        } else if (row >= Q_WIDTH) {
            matrix = layer.k, row -= Q_WIDTH, end = KV_WIDTH;
        }
        run = min(run, end - row);
        return matrix;
    }

    __device__ __forceinline__ bool run(const Instruction& one, int place) {
        const int op = one.op, sides = op == GATED ? 2 : 1;
        if (op == ATTEND || op >= NEXT) return true;
        const int columns = op == O ? Q_WIDTH : op == DOWN ? INNER : HIDDEN;
        const int rows = op == O      ? Tiling<Q_WIDTH>::ROWS
                         : op == DOWN ? Tiling<INNER>::ROWS
                                      : Tiling<HIDDEN>::ROWS;
        const int segment_size = op == O       ? Tiling<Q_WIDTH>::SEGMENT
                                 : op == DOWN  ? Tiling<INNER>::SEGMENT
                                 : op == GATED ? Tiling<HIDDEN>::PAIRS
                                               : Tiling<HIDDEN>::SEGMENT;
#pragma unroll 1
        for (int segment = 0; segment < one.count; segment += segment_size) {
            const int end = min(segment + segment_size, one.count);
#pragma unroll 1
            for (int i = segment; i < end; i += rows)
#pragma unroll 1
                for (int side = 0; side < sides; ++side)
                    if (!load(one, one.first + i, min(rows, end - i), side, columns, place))
                        return false;
        }
        return true;
    }

    // Copies without a waiter must land before the CTA ends.
    __device__ __forceinline__ void drain() {
        if (SKIP_LOADS) return;
        for (u32 i = issued > STAGES ? issued - STAGES : 0; i < issued; ++i) {
            const u32 barrier = address_of(&s.full[i % STAGES]), parity = i / STAGES & 1;
            const long long begin = clock64();
            while (!is_complete(barrier, parity))
                if (u64(clock64() - begin) > p.patience)
                    return report(p, s, LOAD_LATE, i, 0, barrier, parity);
        }
    }
};

// Sum each of N values over the lanes of a warp. A lane gets the sum of the value `row_of` it.
template <int N>
__device__ __forceinline__ float summed(float (&values)[N], int lane) {
    int offset = 16;
#pragma unroll
    for (int half = N / 2; half >= 1; half /= 2) {
        const bool is_upper = lane & offset;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float sent = is_upper ? values[i] : values[i + half];
            const float kept = is_upper ? values[i + half] : values[i];
            values[i] = kept + __shfl_xor_sync(0xffffffffu, sent, offset);
        }
        offset /= 2;
    }
    for (; offset >= 1; offset /= 2)
        values[0] += __shfl_xor_sync(0xffffffffu, values[0], offset);
    return values[0];
}

template <int N>
__device__ __forceinline__ int row_of(int lane) {
    return lane / (32 / N);
}

__device__ __forceinline__ float activated(float x) {
    if (ACTIVATION == 0) return __fdividef(x, 1.0f + __expf(-x));
    if (ACTIVATION == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    return __fdividef(x, 1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}

__device__ __forceinline__ Best better(Best a, Best b) {
    // The first of equal ones.
    return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

__device__ __forceinline__ Best best_of_warp(Best best) {
    for (int offset = 16; offset >= 1; offset /= 2) {
        Best other;
        other.value = __shfl_xor_sync(0xffffffffu, best.value, offset);
        other.token = __shfl_xor_sync(0xffffffffu, best.token, offset);
        best = better(best, other);
    }
    return best;
}

struct Consumer {
    const Parameters& p;
    Shared& s;
    const char* ring;
    Place at;
    int place, op;
    u32 sm;
    long long latest;

    // Add the time since the mark before to that of a mark.
    __device__ __forceinline__ void mark(int which) {
        if (!PROFILE || threadIdx.x != 0) return;
        const long long now = clock64();
        s.profile[PROFILE ? op : 0][which] += now - latest;
        latest = now;
    }

    __device__ __forceinline__ int oldest() const {
        return p.window ? max(0, s.slot + 1 - p.window) : 0;
    }

    __device__ __forceinline__ int used_splits() const {
        const int count = s.slot + 1 - oldest();
        return min(SPLITS, (count + SPLIT_KEYS - 1) / SPLIT_KEYS);
    }

    // Wait until all activations that an instruction reads are there; false: leave.
    __device__ __forceinline__ bool await(const Instruction& one, int round) {
        if (threadIdx.x == 0) {
            if (one.wait >= 0 && !SKIP_MATH)
                await_counter(p, s, one.wait, u32(one.arrivals) * (round + 1), place, round);
            s.leaves[place % 2] = s.is_aborted;
        }
        sync_consumers();
        mark(WAIT);
        return s.leaves[place % 2] == 0;
    }

    __device__ __forceinline__ void await_stage(const Place& tile) {
        const long long begin = PROFILE ? clock64() : 0;
        await_barrier(p, s, address_of(&s.full[tile.slot]), tile.parity, STAGE_LATE, place);
        if (PROFILE && threadIdx.x == 0) s.profile[PROFILE ? op : 0][STARVED] += clock64() - begin;
    }

    // Multiply one tile by x; the sums of each warp go to `parts`.
    template <int K>
    __device__ __forceinline__ void multiply(const Place& tile, const float (&x)[Tiling<K>::EACH][8],
                                             float (*parts)[WARPS]) {
        using T = Tiling<K>;
        const int member = threadIdx.x % TEAM, lane = threadIdx.x % 32;
        await_stage(tile);
        const char* stage = ring + tile.slot * STAGE_BYTES + member * 16;
        float sums[T::PADDED];
#pragma unroll
        for (int row = 0; row < T::PADDED; ++row) sums[row] = 0.0f;
        if (!SKIP_MATH) {
#pragma unroll
            for (int row = 0; row < T::ROWS; ++row)
#pragma unroll
                for (int i = 0; i < T::EACH; ++i)
                    if (T::VECTORS % TEAM == 0 || member + i * TEAM < T::VECTORS) {
                        float w[8];
                        unpack(*reinterpret_cast<const uint4*>(stage + row * 2 * K + i * TEAM * 16),
                               w);
#pragma unroll
                        for (int j = 0; j < 8; ++j) sums[row] = fmaf(w[j], x[i][j], sums[row]);
                    }
        }
        __syncwarp();
        if (lane == 0) arrive(address_of(&s.empty[tile.slot]));
        if (SKIP_MATH) return;
        const float sum = summed<T::PADDED>(sums, lane);
        const int row = row_of<T::PADDED>(lane);
        if (lane % (32 / T::PADDED) == 0 && row < T::ROWS) parts[row][member / 32] = sum;
    }

    __device__ __forceinline__ float added(const float (*parts)[WARPS]) const {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += (*parts)[warp];
        return sum;
    }

    // Load x of a product, with the gain of a norm in it, and the sum of its squares.
    template <int K>
    __device__ __forceinline__ void load_inputs(const Instruction& one, const uint4* gains,
                                                float (&x)[Tiling<K>::EACH][8]) {
        const int member = threadIdx.x % TEAM, lane = threadIdx.x % 32;
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < Tiling<K>::EACH; ++i) {
            const int column = 8 * (member + i * TEAM);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[i][j] = 0.0f;
            if (column >= K) continue;
            if (K == Q_WIDTH && op == O) {
                load_attended(one.layer, column, x[i]);
            } else if (K == INNER && op == DOWN) {
                unpack(load8(p.gated + size_t(one.layer) * INNER + column), x[i]);
            } else if (K == HIDDEN) {
                if (op == QKV && one.layer == 0) {
                    unpack(load8(p.embedding + size_t(s.token) * HIDDEN + column), x[i]);
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        x[i][j] = wide(narrow(x[i][j] * EMBEDDING_SCALE));
                } else {
                    const int layer = op == QKV    ? one.layer - 1
                                      : op == HEAD ? LAYERS - 1
                                                   : one.layer;
                    const float* from = op == GATED ? p.middle : p.output;
                    load_floats(from + size_t(layer) * HIDDEN + column, x[i]);
                }
                float gain[8];
                unpack(gains[i], gain);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    square = fmaf(x[i][j], x[i][j], square);
                    x[i][j] *= ADD_ONE ? gain[j] + 1.0f : gain[j];
                }
            }
        }
        if (K == HIDDEN && has_norm()) {
            for (int offset = 16; offset >= 1; offset /= 2)
                square += __shfl_xor_sync(0xffffffffu, square, offset);
            if (lane == 0 && threadIdx.x < TEAM) s.squares[threadIdx.x / 32] = square;
        }
    }

    __device__ __forceinline__ bool has_norm() const {
        return op == QKV || op == GATED || op == HEAD;
    }

    // Merge the splits of attention.
    __device__ __forceinline__ void load_attended(int layer, int column, float (&x)[8]) {
        const int used = used_splits();
        const size_t unit = (size_t(layer) * HEADS * GROUP + column / DIM) * SPLITS;
        const float* from = p.partial + unit * DIM + column % DIM;
        if (used == 1) return load_floats(from, x);
        float lse[SPLITS], largest = NEGATIVE, total = 0.0f;
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) {
            lse[split] = split < used ? __ldcg(p.lse + unit + split) : NEGATIVE;
            largest = fmaxf(largest, lse[split]);
        }
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) {
            if (split >= used) break;
            float part[8];
            load_floats(from + split * DIM, part);
            const float weight = power_of_2(lse[split] - largest);
            total += weight;
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = fmaf(weight, part[j], x[j]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = __fdividef(x[j], total);
    }

    __device__ __forceinline__ float bias_of(const u16* bias, int row) const {
        return !HAS_BIAS || bias == nullptr ? 0.0f : wide(__ldg(bias + row));
    }

    // What is added to an output: its bias, and the residual stream. Known before the wait.
    __device__ __forceinline__ float offset_of(const Layer& layer, int number, int row) const {
        float before = 0.0f;
        if (op == DOWN) {
            before = __ldcg(p.middle + size_t(number) * HIDDEN + row);
        } else if (op == O && number > 0) {
            before = __ldcg(p.output + size_t(number - 1) * HIDDEN + row);
        } else if (op == O) {
            const float x = wide(p.embedding[size_t(s.token) * HIDDEN + row]);
            before = wide(narrow(x * EMBEDDING_SCALE));
        }
        if (!HAS_BIAS || op == HEAD) return before;
        const u16* bias = op == O ? layer.o_bias : op == DOWN ? layer.down_bias : layer.gate_bias;
        if (op == QKV) {
            bias = layer.q_bias;
            if (row >= Q_WIDTH + KV_WIDTH) {
                bias = layer.v_bias, row -= Q_WIDTH + KV_WIDTH;
            } else if (row >= Q_WIDTH) {
                bias = layer.k_bias, row -= Q_WIDTH;
            }
        }
        return before + bias_of(bias, row);
    }

    template <int K>
    __device__ __forceinline__ bool product(const Instruction& one, int round) {
        using T = Tiling<K>;
        const bool is_gated = K == HIDDEN && op == GATED;
        const int segment_size = is_gated ? T::PAIRS : T::SEGMENT;
        const int thread = threadIdx.x, member = thread % TEAM, team = thread / TEAM;
        const Layer& layer = s.layers[one.layer];
        uint4 gains[T::EACH];
        if (K == HIDDEN && has_norm()) {
            const u16* gain = op == HEAD ? p.norm : is_gated ? layer.mlp_gain
                                                             : layer.attention_gain;
#pragma unroll
            for (int i = 0; i < T::EACH; ++i)
                if (member + i * TEAM < T::VECTORS)
                    gains[i] = __ldg(reinterpret_cast<const uint4*>(gain) + member + i * TEAM);
        }
        float offset = 0.0f;
        if (thread < min(segment_size, one.count))
            offset = offset_of(layer, one.layer, one.first + thread);
        if (!await(one, round)) return false;
        float x[T::EACH][8];
        if (!SKIP_MATH) load_inputs<K>(one, gains, x);
        mark(INPUTS);
        Best best = {NEGATIVE, 0};
        int buffer = 0;
#pragma unroll 1
        for (int segment = 0; segment < one.count; segment += segment_size) {
            const int count = min(segment_size, one.count - segment);
            const int each = (count + T::ROWS - 1) / T::ROWS;
            const int tiles = is_gated ? 2 * each : each;
            // A team always has the same slots: it has then seen the fill before the one it waits
            // for, whose parity is that of the last but one.
            const int skipped = (team + GROUPS - at.slot % GROUPS) % GROUPS;
            Place tile = at;
            tile.advance(skipped);
#pragma unroll 1
            for (int i = skipped; i < tiles; i += GROUPS, tile.advance(GROUPS)) {
                const int first = is_gated ? i % 2 * (PARTS / 2) + i / 2 * T::ROWS : i * T::ROWS;
                multiply<K>(tile, x, s.parts[buffer] + first);
            }
            at.advance(tiles % STAGES);
            if (tiles / STAGES % 2) at.parity ^= 1;
            mark(TILES);
            sync_consumers();
            mark(SYNC);
            if (thread / 32 * 32 < count && !SKIP_MATH) {
                if (segment > 0 && thread < count)
                    offset = offset_of(layer, one.layer, one.first + segment + thread);
                if (thread < count)
                    store<K>(one, segment + thread, s.parts[buffer] + thread, offset, best);
                mark(STORE);
                if (op != HEAD) signal(p, one.signal);
                mark(SIGNAL);
            }
            buffer ^= 1;
        }
        if (K == HIDDEN && op == HEAD && thread < PARTS && !SKIP_MATH) {
            best = best_of_warp(best);
            if (thread % 32 == 0) {
                Best* to = p.bests + sm * PART_WARPS + thread / 32;
                __stcg(reinterpret_cast<float2*>(to),
                       make_float2(best.value, __int_as_float(best.token)));
            }
            signal(p, one.signal);
        }
        return true;
    }

    // Finish an output of a product.
    template <int K>
    __device__ __forceinline__ void store(const Instruction& one, int index,
                                          const float (*parts)[WARPS], float offset, Best& best) {
        float value = added(parts), scale = 1.0f;
        if (K == HIDDEN && has_norm()) {
            float square = 0.0f;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) square += s.squares[warp];
            scale = rsqrtf(square * (1.0f / K) + EPSILON);
        }
        value = fmaf(value, scale, offset);
        const int row = one.first + index;
        if (K == HIDDEN && op == GATED) {
            const float up = fmaf(added(parts + PARTS / 2), scale,
                                  bias_of(s.layers[one.layer].up_bias, row));
            p.gated[size_t(one.layer) * INNER + row] = narrow(activated(value) * up);
        } else if (K == HIDDEN && op == HEAD) {
            if (p.logits != nullptr) p.logits[row] = value;
            if (value > best.value) best.value = value, best.token = row;
        } else {
            float* to = op == QKV ? p.qkv + size_t(one.layer) * QKV_WIDTH
                                  : (op == O ? p.middle : p.output) + size_t(one.layer) * HIDDEN;
            __stcg(to + row, value);
        }
    }

    // Rotate 8 columns of a head; every lane of the head takes part.
    __device__ __forceinline__ void load_rotated(const float* from, const u16* gain,
                                                 const float (&cosine)[8], const float (&sine)[8],
                                                 float (&x)[8]) const {
        const int lane = threadIdx.x % KEY_LANES, column = 8 * lane;
        float other[8];
        load_floats(from + column, x);
        load_floats(from + (column + DIM / 2) % DIM, other);
        if (HAS_QK_NORM) {
            float square = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) square = fmaf(x[j], x[j], square);
#pragma unroll
            for (int offset = KEY_LANES / 2; offset >= 1; offset /= 2)
                square += __shfl_xor_sync(0xffffffffu, square, offset);
            const float scale = rsqrtf(square * (1.0f / DIM) + EPSILON);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float one = wide(gain[column + j]);
                const float another = wide(gain[(column + DIM / 2) % DIM + j]);
                x[j] *= scale * (ADD_ONE ? one + 1.0f : one);
                other[j] *= scale * (ADD_ONE ? another + 1.0f : another);
            }
        }
#pragma unroll
        for (int j = 0; j < 8; ++j)
            x[j] = fmaf(x[j], cosine[j], (column < DIM / 2 ? -other[j] : other[j]) * sine[j]);
    }

    // One query head and one split of its keys; a team of lanes takes a key.
    __device__ __forceinline__ bool attend(const Instruction& one, int round) {
        const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
        const int team = thread / KEY_LANES, column = 8 * (thread % KEY_LANES);
        const int head = one.first / SPLITS, split = one.first % SPLITS;
        const int key_head = head / GROUP, slot = s.slot;
        const Layer& layer = s.layers[one.layer];
        const int first_key = oldest(), used = used_splits();
        const int each = (slot + 1 - first_key + used - 1) / used;
        const int begin = first_key + split * each;
        const int end = split < used ? min(begin + each, slot + 1) : begin;
        u16* keys = layer.keys + size_t(key_head) * p.length * DIM + column;
        u16* values = layer.values + size_t(key_head) * p.length * DIM + column;
        uint4 k[KEYS_AHEAD], v[KEYS_AHEAD];
        // Keys of earlier steps.
#pragma unroll
        for (int i = 0; i < KEYS_AHEAD; ++i) {
            const int key = begin + team + i * KEY_TEAMS;
            if (key < min(end, slot)) {
                k[i] = load8(keys + size_t(key) * DIM);
                v[i] = load8(values + size_t(key) * DIM);
            }
        }
        float cosine[8], sine[8];
        load_floats(p.cosines + size_t(slot) * DIM + column, cosine);
        load_floats(p.sines + size_t(slot) * DIM + column, sine);
        if (!await(one, round)) return false;
        if (SKIP_MATH) return true;
        const float* qkv = p.qkv + size_t(one.layer) * QKV_WIDTH;
        float q[8], new_k[8], new_v[8];
        load_rotated(qkv + head * DIM, layer.q_gain, cosine, sine, q);
        load_rotated(qkv + Q_WIDTH + key_head * DIM, layer.k_gain, cosine, sine, new_k);
        load_floats(qkv + Q_WIDTH + KV_WIDTH + key_head * DIM + column, new_v);
        mark(INPUTS);
        uint4 packed_k, packed_v;
        u32* narrow_k = reinterpret_cast<u32*>(&packed_k);
        u32* narrow_v = reinterpret_cast<u32*>(&packed_v);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            narrow_k[j] = narrow(new_k[2 * j]) | u32(narrow(new_k[2 * j + 1])) << 16;
            narrow_v[j] = narrow(new_v[2 * j]) | u32(narrow(new_v[2 * j + 1])) << 16;
        }
        if (head % GROUP == 0 && split == used - 1 && team == 0) {
            __stcg(reinterpret_cast<uint4*>(keys + size_t(slot) * DIM), packed_k);
            __stcg(reinterpret_cast<uint4*>(values + size_t(slot) * DIM), packed_v);
        }
        float sums[8], largest = NEGATIVE, total = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[j] = 0.0f;
        // All lanes of a warp stay together, as they exchange sums.
        for (int base = begin; base < end; base += KEYS_AHEAD * KEY_TEAMS) {
#pragma unroll
            for (int i = 0; i < KEYS_AHEAD; ++i) {
                const int key = base + team + i * KEY_TEAMS;
                float score = 0.0f, k8[8], v8[8];
                unpack(key == slot ? packed_k : k[i], k8);
                unpack(key == slot ? packed_v : v[i], v8);
#pragma unroll
                for (int j = 0; j < 8; ++j) score = fmaf(q[j], k8[j], score);
                const int next = key + KEYS_AHEAD * KEY_TEAMS;
                if (next < min(end, slot)) {
                    k[i] = load8(keys + size_t(next) * DIM);
                    v[i] = load8(values + size_t(next) * DIM);
                }
#pragma unroll
                for (int offset = KEY_LANES / 2; offset >= 1; offset /= 2)
                    score += __shfl_xor_sync(0xffffffffu, score, offset);
                if (key < end) {
                    score *= SCALE;
                    const float before = largest;
                    largest = fmaxf(largest, score);
                    const float shrink = power_of_2(before - largest);
                    const float weight = power_of_2(score - largest);
                    total = fmaf(total, shrink, weight);
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        sums[j] = fmaf(sums[j], shrink, weight * v8[j]);
                }
            }
        }
        mark(TILES);
        // Teams of the warp, then warps of the CTA.
        for (int offset = KEY_LANES; offset < 32; offset *= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, largest, offset);
            const float before = largest;
            largest = fmaxf(largest, other);
            const float mine = power_of_2(before - largest), theirs = power_of_2(other - largest);
            total = total * mine + __shfl_xor_sync(0xffffffffu, total, offset) * theirs;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                sums[j] = sums[j] * mine + __shfl_xor_sync(0xffffffffu, sums[j], offset) * theirs;
        }
        if (lane < KEY_LANES) {
#pragma unroll
            for (int j = 0; j < 8; ++j) s.attended[warp][column + j] = sums[j];
            if (lane == 0) s.attended[warp][DIM] = largest, s.attended[warp][DIM + 1] = total;
        }
        sync_consumers();
        mark(SYNC);
        if (thread / 32 * 32 < DIM) {
            if (thread < DIM && split < used) {
                float top = NEGATIVE, sum = 0.0f, all = 0.0f;
#pragma unroll
                for (int i = 0; i < CONSUMERS / 32; ++i) top = fmaxf(top, s.attended[i][DIM]);
#pragma unroll
                for (int i = 0; i < CONSUMERS / 32; ++i) {
                    const float weight = power_of_2(s.attended[i][DIM] - top);
                    sum = fmaf(weight, s.attended[i][thread], sum);
                    all = fmaf(weight, s.attended[i][DIM + 1], all);
                }
                const size_t unit = size_t(one.layer) * HEADS * GROUP * SPLITS + one.first;
                __stcg(p.partial + unit * DIM + thread, __fdividef(sum, all));
                if (thread == 0) __stcg(p.lse + unit, top + __log2f(all));
            }
            mark(STORE);
            signal(p, one.signal);
            mark(SIGNAL);
        }
        return true;
    }

    // Choose the next token; each CTA finds the same.
    __device__ __forceinline__ bool next(const Instruction& one, int round) {
        const int thread = threadIdx.x;
        if (!await(one, round)) return false;
        Best best = {NEGATIVE, VOCABULARY - 1};
        for (int i = thread; i < int(gridDim.x) * PART_WARPS && !SKIP_MATH; i += CONSUMERS) {
            const float2 found = __ldcg(reinterpret_cast<const float2*>(p.bests + i));
            best = better(best, Best{found.x, __float_as_int(found.y)});
        }
        best = best_of_warp(best);
        if (thread % 32 == 0) s.bests[thread / 32] = best;
        sync_consumers();
        if (thread == 0) {
            for (int i = 1; i < CONSUMERS / 32; ++i) best = better(best, s.bests[i]);
            // Logits that are NaN may have chosen none.
            const int token = min(max(best.token, 0), VOCABULARY - 1);
            for (int i = 0; i < MOST_STOPS; ++i) s.is_finished |= s.stops[i] == token;
            if (sm == 0) {
                const long long call = p.state[CALL];
                *reinterpret_cast<volatile long long*>(p.tokens + s.step) = call << 32 | token;
            }
            s.token = token;
            // A step behind the end of the cache repeats the last slot; its token is not read.
            s.slot = min(s.slot + 1, p.length - 1);
            s.step = min(s.step + 1, p.kept - 1);
        }
        // Nobody reads the new slot and token before the others have read the old ones.
        sync_consumers();
        return true;
    }

    __device__ __forceinline__ bool run(const Instruction& one, int round) {
        if (op == ATTEND) return attend(one, round);
        if (op == NEXT) return next(one, round);
        if (op >= OPS) return true;
        // One copy of the code for each number of inputs.
        const int columns = op == O ? Q_WIDTH : op == DOWN ? INNER : HIDDEN;
        if (columns == HIDDEN) return product<HIDDEN>(one, round);
        if (Q_WIDTH != HIDDEN && columns == Q_WIDTH) return product<Q_WIDTH>(one, round);
        return product<INNER>(one, round);
    }
};

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
    decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) char memory[];
    char* ring = memory;
    Shared& s = *reinterpret_cast<Shared*>(memory + STAGES * STAGE_BYTES);
    const int thread = threadIdx.x;
    // The schedule knows SMs, which differ in the rate at which they read.
    const u32 sm = sm_of_cta();
    if (sm >= gridDim.x) {
        if (thread == 0 && atomicCAS(p.fault, 0u, u32(UNKNOWN_SM)) == 0u)
            *reinterpret_cast<volatile u32*>(p.host_fault) = UNKNOWN_SM;
        return;
    }
    const Instruction* mine = p.instructions + size_t(sm) * INSTRUCTIONS;
    for (int i = thread; i < INSTRUCTIONS * int(sizeof(Instruction)) / 16; i += blockDim.x)
        reinterpret_cast<uint4*>(s.instructions)[i] = reinterpret_cast<const uint4*>(mine)[i];
    for (int i = thread; i < LAYERS * int(sizeof(Layer)) / 16; i += blockDim.x)
        reinterpret_cast<uint4*>(s.layers)[i] = reinterpret_cast<const uint4*>(p.layers)[i];
    if (thread < MOST_STOPS) s.stops[thread] = p.stops[thread];
    if (thread == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], WARPS);
        }
        s.slot = p.state[SLOT], s.step = p.state[STEP], s.token = p.state[TOKEN];
        s.is_finished = p.state[IS_FINISHED];
        s.is_aborted = 0, s.stops_loads = 0;
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (thread >= CONSUMERS) {
        if (thread > CONSUMERS) return;
        u64 policy;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        Producer producer = {p, s, ring, policy, {0, 0}, {0, 0}, 0};
        bool goes_on = s.is_finished == 0;
        for (int round = 0; round < p.steps && goes_on; ++round)
            for (int i = 0; i < INSTRUCTIONS && goes_on; ++i)
                goes_on = producer.run(s.instructions[i], i);
        producer.drain();
        return;
    }
    const long long begin = PROFILE ? clock64() : 0;
    if (PROFILE && thread == 0)
        for (int i = 0; i < OPS * MARKS; ++i) s.profile[0][i] = 0;
    Consumer consumer = {p, s, ring, {0, 0}, 0, 0, sm, begin};
    bool goes_on = true;
    for (int round = 0; round < p.steps && goes_on && !s.is_finished; ++round)
#pragma unroll 1
        for (int i = 0; i < INSTRUCTIONS && goes_on; ++i) {
            const Instruction one = s.instructions[i];
            consumer.place = i, consumer.op = one.op;
            goes_on = consumer.run(one, round);
        }
    s.stops_loads = 1;
    if (thread == 0 && sm == 0) {
        p.state[SLOT] = s.slot, p.state[STEP] = s.step, p.state[TOKEN] = s.token;
        p.state[IS_FINISHED] = s.is_finished;
    }
    if (PROFILE && thread == 0) {
        s.profile[0][MARKS - 1] = clock64() - begin;
        for (int i = 0; i < OPS * MARKS; ++i)
            p.profile[size_t(sm) * OPS * MARKS + i] = s.profile[0][i];
    }
}
