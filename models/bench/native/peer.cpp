// One of llama.cpp's kin behind four functions, compiled against its own llama.h: the layout of its
// parameters differs from version to version. Loaded by peer_library.py. IK: ik_llama.cpp.

#include <llama.h>

#include <chrono>
#include <vector>

namespace {

llama_model * model = nullptr;
llama_context * context = nullptr;
std::vector<llama_token> held;  // tokens in the cache

double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

bool forget_from(size_t count) {
#ifdef IK
    return llama_kv_cache_seq_rm(context, 0, (llama_pos) count, -1);
#else
    return llama_memory_seq_rm(llama_get_memory(context), 0, (llama_pos) count, -1);
#endif
}

// Leaves the first `count` tokens in the cache, or none: a recurrent state is kept whole or not.
// How many are left.
size_t keep_first(size_t count) {
    const size_t left = count == held.size() || forget_from(count) ? count : 0;
    if (left < count) {
        forget_from(0);
    }
    held.resize(left);
    return left;
}

// Reads tokens behind the cache, at most `most` at once; logits of the last one.
bool read(const llama_token * tokens, int count, int most) {
    llama_batch batch = llama_batch_init(most, 0, 1);
    bool good = true;
    for (int first = 0; good && first < count; first += most) {
        batch.n_tokens = count - first < most ? count - first : most;
        for (int i = 0; i < batch.n_tokens; ++i) {
            batch.token[i] = tokens[first + i];
            batch.pos[i] = (llama_pos) held.size();
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = first + i == count - 1;
            held.push_back(tokens[first + i]);
        }
        good = llama_decode(context, batch) == 0;
    }
    llama_batch_free(batch);
    return good;
}

llama_token best(int vocabulary) {
    const float * logits = llama_get_logits_ith(context, -1);
    int found = 0;
    for (int i = 1; i < vocabulary; ++i) {
        if (logits[i] > logits[found]) {
            found = i;
        }
    }
    return found;
}

}  // namespace

extern "C" {

// 0, or what failed: 1 the model, 2 its context.
int peer_open(const char * path, int threads, int tokens) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params m = llama_model_default_params();
    llama_context_params c = llama_context_default_params();
#ifdef IK  // llama.cpp repacks and attends fast without being asked
    m.use_mmap = false;
    m.repack_tensors = true;
    c.flash_attn = true;
#endif
    c.n_ctx = tokens;
    c.n_batch = c.n_ubatch = 512;
    c.n_threads = c.n_threads_batch = threads;
    model = llama_model_load_from_file(path, m);
    if (model == nullptr) {
        return 1;
    }
    context = llama_init_from_model(model, c);
    return context == nullptr ? 2 : 0;
}

// Greedy: reads `ids` behind what of them is cached if `keep`, then `fresh` tokens into `out`.
// `seconds` becomes those of the prompt and those of all tokens but the first. Prompt tokens read,
// or -1.
int peer_run(const int * ids, int count, int fresh, int keep, int * out, double * seconds) {
    size_t known = 0;
    const size_t most = keep && count > 0 ? count - 1 : 0;  // the last one's logits are wanted
    while (known < held.size() && known < most && held[known] == ids[known]) {
        ++known;
    }
    known = keep_first(known);
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    double begun = now();
    if (!read(ids + known, count - (int) known, 512)) {
        return -1;
    }
    out[0] = best(vocabulary);
    seconds[0] = now() - begun;
    begun = now();
    for (int i = 1; i < fresh; ++i) {
        if (!read(out + i - 1, 1, 1)) {
            return -1;
        }
        out[i] = best(vocabulary);
    }
    seconds[1] = now() - begun;
    return count - (int) known;
}

}
