/* A disk that fails at a chosen moment. Preloaded into a process, it counts what changes files whose path contains a
   given text: opening for writing, write, fsync, rename, mkdir, rmdir, unlink. `disk_arm` sets the text, the counter (a
   file of eight bytes that the process and its forks share), the number of the change at which it strikes, and how:

     KILL   the process is killed; of a write, some bytes are written
     FULL   of a write, some bytes are written; from then on there is no space left
     SYNC   from then on fsync fails

   `share`, from 0 to 999,999, says how many millionths of the bytes of that write are written. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL, FULL, SYNC };
static const char *where;
static long *count, at, share;
static int does;

static int real_open(const char *path, int flags) {
  static int (*real)(const char *, int, ...);
  if (!real) real = dlsym(RTLD_NEXT, "open");
  return real(path, flags);
}

void disk_arm(const char *path, const char *counter, long moment, int what, long millionths) {
  int file = real_open(counter, O_RDWR);
  if (file < 0) return;
  count = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  where = strdup(path), at = moment, does = what, share = millionths;
}

/* 0: go on; 1: this is the moment; 2: it is past. */
static int struck(const char *path) {
  char here[2 * PATH_MAX] = "";
  if (!where || !path) return 0;
  if (*path != '/' && !getcwd(here, PATH_MAX)) return 0;
  strncat(strncat(here, "/", 2), path, PATH_MAX - 1);
  if (!strstr(here, where)) return 0;
  long now = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
  if (!at || now < at) return 0;
  return now == at ? 1 : 2;
}

static const char *path_of(int file, char *room) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, room, PATH_MAX - 1);
  room[size < 0 ? 0 : size] = 0;
  return *room == '/' ? room : NULL; /* a pipe is on no disk */
}

/* Whether the call is refused; does not come back from a kill. */
static int refused(int now) {
  if (now == 1 && does == KILL) kill(getpid(), SIGKILL), pause();
  errno = ENOSPC;
  return now && does == FULL;
}

/* How many bytes of a write are written where it strikes. */
static size_t some(size_t size) { return does == SYNC ? size : size * share / 1000000; }

#define REAL(result, name, ...) \
  static result (*real)(__VA_ARGS__); \
  if (!real) real = dlsym(RTLD_NEXT, name)

#define OPENS(name) \
  int name(const char *path, int flags, ...) { \
    REAL(int, #name, const char *, int, ...); \
    va_list rest; \
    va_start(rest, flags); \
    int mode = va_arg(rest, int); \
    va_end(rest); \
    if (flags & (O_WRONLY | O_RDWR | O_CREAT) && refused(struck(path))) return -1; \
    return real(path, flags, mode); \
  }
#define OPENS_AT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    REAL(int, #name, int, const char *, int, ...); \
    va_list rest; \
    va_start(rest, flags); \
    int mode = va_arg(rest, int); \
    va_end(rest); \
    if (flags & (O_WRONLY | O_RDWR | O_CREAT) && refused(struck(path))) return -1; \
    return real(folder, path, flags, mode); \
  }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

#define PATH_COUNTS(file) \
  char room[PATH_MAX]; \
  int now = where ? struck(path_of(file, room)) : 0

ssize_t write(int file, const void *bytes, size_t size) {
  REAL(ssize_t, "write", int, const void *, size_t);
  PATH_COUNTS(file);
  if (now == 1 && some(size)) {
    ssize_t done = real(file, bytes, some(size));
    if (does != KILL) return done;
  }
  return refused(now) ? -1 : real(file, bytes, size);
}

ssize_t writev(int file, const struct iovec *parts, int number) {
  REAL(ssize_t, "writev", int, const struct iovec *, int);
  PATH_COUNTS(file);
  if (now == 1 && number && some(parts->iov_len)) {
    ssize_t done = real(file, &(struct iovec){parts->iov_base, some(parts->iov_len)}, 1);
    if (does != KILL) return done;
  }
  return refused(now) ? -1 : real(file, parts, number);
}

#define PWRITES(name, offset_t) \
  ssize_t name(int file, const void *bytes, size_t size, offset_t place) { \
    REAL(ssize_t, #name, int, const void *, size_t, offset_t); \
    PATH_COUNTS(file); \
    if (now == 1 && some(size)) real(file, bytes, some(size), place); \
    return refused(now) ? -1 : real(file, bytes, size, place); \
  }
PWRITES(pwrite, off_t)
PWRITES(pwrite64, off64_t)

int fsync(int file) {
  REAL(int, "fsync", int);
  PATH_COUNTS(file);
  if (now && does == SYNC) {
    errno = EIO;
    return -1;
  }
  return refused(now) ? -1 : real(file);
}

/* Names can be given and taken on a full disk, too. */
static int struck_name(const char *path) {
  int now = struck(path);
  return does == FULL ? 0 : now;
}

int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  return refused(struck_name(to)) ? -1 : real(from, to);
}

#define TAKES(name) \
  int name(const char *path) { \
    REAL(int, #name, const char *); \
    return refused(struck_name(path)) ? -1 : real(path); \
  }
TAKES(unlink)
TAKES(rmdir)

/* Inside a folder that is being removed: `path` has no folder before it. */
int unlinkat(int folder, const char *path, int flags) {
  REAL(int, "unlinkat", int, const char *, int);
  char room[PATH_MAX];
  return refused(struck_name(folder < 0 ? path : path_of(folder, room))) ? -1 : real(folder, path, flags);
}

int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir", const char *, mode_t);
  return refused(struck(path)) ? -1 : real(path, mode);
}
