// The log: one JSON object a line, in the order in which the host acted.
//
// Every line is a primitive (a copy on a stream, a record, a wait, a host access with its byte
// range), whatever the contract that was played: who reads the log needs to know none of them.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <unistd.h>
#include <unordered_map>

inline const char * setting(const char * name, const char * otherwise) {
    const char * value = getenv(name);
    return value && *value ? value : otherwise;
}

// A name as JSON text: what would need an escape becomes '_'.
inline std::string plain(const char * s) {
    std::string out;
    for (; *s; s++) out += (*s == '"' || *s == '\\' || (unsigned char) *s < 32 || (unsigned char) *s > 126) ? '_' : *s;
    return out;
}

inline unsigned long long number(const void * p) { return (unsigned long long) (uintptr_t) p; }

// FNV-1a: two runs whose results are equal have equal sums.
inline unsigned long long sum(const void * p, size_t n) {
    unsigned long long h = 14695981039346656037ull;
    for (size_t i = 0; i < n; i++) h = (h ^ ((const unsigned char *) p)[i]) * 1099511628211ull;
    return h;
}

class Log {
  public:
    Log() {
        const char * path = setting("GGRAPH_RECORD_LOG", nullptr);
        if (path) fd_ = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        left_ = atoll(setting("GGRAPH_RECORD_LIMIT", "268435456"));
    }
    bool on() const { return fd_ >= 0; }

    // One line, written at once: a crash of the program loses nothing.
    void line(const char * format, ...) __attribute__((format(printf, 2, 3))) {
        if (!on()) return;
        char text[8192];
        va_list args;
        va_start(args, format);
        int n = vsnprintf(text, sizeof text - 1, format, args);
        va_end(args);
        if (n < 0 || n >= (int) sizeof text - 1) return stop("a line is too long");
        text[n] = '\n';
        put(text, n + 1);
    }

    // A list of kernels that may have been logged before: then its old number is returned.
    int list(const std::string & nodes) {
        auto [at, fresh] = lists_.emplace(nodes, (int) lists_.size());
        if (fresh && on()) {
            std::string text = "{\"t\":\"nodes\",\"id\":" + std::to_string(at->second) + ",\"nodes\":[" + nodes + "]}\n";
            put(text.data(), text.size());
        }
        return at->second;
    }

  private:
    void put(const char * text, size_t n) {
        left_ -= (long long) n;
        if (left_ < 0) return stop("the limit of bytes is reached");
        if (write(fd_, text, n) != (ssize_t) n) fd_ = -1;
    }
    // What follows is missing, and the reader must know it.
    void stop(const char * why) {
        char text[128];
        int n = snprintf(text, sizeof text, "{\"t\":\"full\",\"why\":\"%s\"}\n", why);
        if (write(fd_, text, n) != n) {}
        fd_ = -1;
    }
    int fd_ = -1;
    long long left_ = 0;
    std::unordered_map<std::string, int> lists_;
};

inline Log g_log;
