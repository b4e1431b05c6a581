/* What touches the disk below one folder: counted, named, and made to fail at the k-th.

   Loaded before the C library (LD_PRELOAD): Python's files, Pillow, SQLite and safetensors all end here. One thing goes
   past it: the rename inside of safetensors' own save_file, which asks the kernel itself. The numbers lie in memory
   that a forked child shares with its parent, so that they are still there when the child is killed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FDS = 1024, PATH = 320, NAMES = 8192, NAME = 96, DIRTY = 512 };
enum mode { COUNT, FAIL, FULL, SHORT, KILL, TORN, CUT, SIGNAL, LOCKED };
enum { HALF = -1 };

struct page {
    long armed, at, mode, number; /* what is asked for; `number` is the signal of SIGNAL */
    long progress;                /* how progress.json fails: an error number, HALF, or 0 for not at all */
    long count, fired, steps, full, happened;
    char root[PATH];
    char names[NAMES][NAME];
};
static struct page *page;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static char paths[FDS][PATH];
static struct { char path[PATH]; ino_t inode; long safe; } dirty[DIRTY]; /* not flushed: bytes that a power cut leaves */

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) page = NULL;
}

struct page *disk_page(void) { return page; }

static int below(const char *path) {
    return page && page->armed && path[0] && !strncmp(path, page->root, strlen(page->root));
}

/* A run writes its progress by the clock, so what touches it has no number. It fails by itself, as `page->progress` says. */
static int is_progress(const char *path) { return below(path) && strstr(path, "progress.json"); }

/* SQLite's -shm files are memory that processes share, and hold nothing that lasts. */
static int watched(const char *path) {
    if (!below(path) || is_progress(path)) return 0;
    size_t length = strlen(path);
    return length < 4 || strcmp(path + length - 4, "-shm");
}

static void whole(int folder, const char *path, char *into) {
    into[0] = 0;
    if (!path) return;
    if (path[0] == '/') snprintf(into, PATH, "%s", path);
    else if (folder >= 0 && folder < FDS && paths[folder][0]) snprintf(into, PATH, "%s/%s", paths[folder], path);
}

static const char *path_of(int fd) { return fd >= 0 && fd < FDS ? paths[fd] : ""; }

static void touched(int fd, const char *path, int emptied) {
    struct stat facts;
    int place = -1;
    if (fstat(fd, &facts) || !S_ISREG(facts.st_mode)) return;
    for (int i = 0; i < DIRTY; i++) {
        if (dirty[i].inode == facts.st_ino) { place = i; break; }
        if (place < 0 && !dirty[i].inode) place = i;
    }
    if (place < 0) return;
    if (dirty[place].inode != facts.st_ino) dirty[place].safe = (long)facts.st_size;
    if (emptied) dirty[place].safe = 0;
    dirty[place].inode = facts.st_ino;
    snprintf(dirty[place].path, PATH, "%s", path);
}

static void forget(int fd) {
    struct stat facts;
    if (!fstat(fd, &facts))
        for (int i = 0; i < DIRTY; i++) if (dirty[i].inode == facts.st_ino) dirty[i].inode = 0;
}

/* A file that was renamed by itself is known by its inode. */
static void seen(int fd, const char *path) {
    struct stat facts;
    if (!fstat(fd, &facts))
        for (int i = 0; i < DIRTY; i++) if (dirty[i].inode == facts.st_ino) snprintf(dirty[i].path, PATH, "%s", path);
}

static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

static void cut_power(void) {
    struct stat facts;
    for (int i = 0; i < DIRTY; i++) {
        int there = dirty[i].inode && !stat(dirty[i].path, &facts) && facts.st_ino == dirty[i].inode;
        if (there && truncate(dirty[i].path, dirty[i].safe)) continue;
    }
    die();
}

/* Of a full disk with a `number`: there is room again after so many refusals and looks at how much is free. */
static void refused(void) {
    if (page->mode == FULL && page->number > 0 && --page->number == 0) page->full = 0;
}

/* Counts one operation. 0: do it; an error number: fail with that; -1: do half of it (a write). */
static int next(const char *kind, const char *path, int takes_room) {
    int verdict = 0;
    pthread_mutex_lock(&turn);
    long here = page->count++;
    if (here < NAMES) snprintf(page->names[here], NAME, "%s %s", kind, path + strlen(page->root));
    int locked = page->mode == LOCKED && kind[0] != 'f' ? EROFS : 0; /* a flush has nothing to do then */
    if (page->full) verdict = page->mode == LOCKED ? locked : takes_room ? ENOSPC : 0;
    else if (!page->fired && here >= page->at && (kind[0] == 'w' || (page->mode != TORN && page->mode != SHORT))) {
        page->fired = 1;
        switch (page->mode) {
            case FAIL: verdict = EIO; break;
            case FULL: page->full = 1; verdict = takes_room ? (kind[0] == 'w' ? -1 : ENOSPC) : 0; break;
            case SHORT: verdict = -1; break;
            case KILL: die(); break;
            case TORN: verdict = -1; break;
            case CUT: cut_power(); break;
            case LOCKED: page->full = 1; verdict = locked; break;
            case SIGNAL: kill(getpid(), (int)page->number); break;
        }
    }
    if (verdict && page->full) refused();
    pthread_mutex_unlock(&turn);
    return verdict;
}

#define STOP(kind, path, room, failed) \
    do { int verdict = next(kind, path, room); if (verdict > 0) { errno = verdict; return failed; } } while (0)

static int opened(int fd, const char *path, int flags) {
    if (fd >= 0 && fd < FDS) snprintf(paths[fd], PATH, "%s", path);
    if (fd >= 0 && watched(path)) {
        seen(fd, path);
        if (flags & (O_CREAT | O_TRUNC)) touched(fd, path, flags & O_TRUNC);
    }
    return fd;
}

static int open_at(int (*real)(int, const char *, int, ...), int folder, const char *path, int flags, mode_t mode) {
    char full[PATH];
    whole(folder, path, full);
    int writes = (flags & O_ACCMODE) != O_RDONLY && (flags & (O_CREAT | O_TRUNC));
    if (writes && watched(full)) STOP("open", full, 1, -1);
    if (writes && is_progress(full) && page->progress == EACCES) { page->happened = 1; errno = EACCES; return -1; }
    return opened(real(folder, path, flags, mode), full, flags);
}

#define MODE(flags) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags) return open_at(REAL(openat), AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return open_at(REAL(openat64), AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags) return open_at(REAL(openat), folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags) return open_at(REAL(openat64), folder, path, flags, mode); }

int close(int fd) {
    if (fd >= 0 && fd < FDS) paths[fd][0] = 0;
    return REAL(close)(fd);
}

#define WRITE(short_call, full_call) \
    const char *path = path_of(fd); \
    if (is_progress(path) && (page->progress == ENOSPC || page->progress == HALF)) { \
        ssize_t half = short_call; \
        page->happened = 1; \
        if (page->progress == HALF && half >= 0) return size; \
        errno = ENOSPC; \
        return -1; \
    } \
    if (!watched(path)) return full_call; \
    touched(fd, path, 0); \
    int verdict = next("write", path, 1); \
    if (verdict > 0) { errno = verdict; return -1; } \
    if (verdict < 0 && size > 1) { ssize_t done = short_call; if (page->mode == TORN) die(); return done; } \
    if (verdict < 0 && page->mode == TORN) die(); \
    if (verdict < 0 && page->mode == FULL) { errno = ENOSPC; return -1; } \
    return full_call

ssize_t write(int fd, const void *data, size_t size) { WRITE(REAL(write)(fd, data, size / 2), REAL(write)(fd, data, size)); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { WRITE(REAL(pwrite)(fd, data, size / 2, at), REAL(pwrite)(fd, data, size, at)); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { WRITE(REAL(pwrite64)(fd, data, size / 2, at), REAL(pwrite64)(fd, data, size, at)); }
ssize_t writev(int fd, const struct iovec *parts, int size) { WRITE(REAL(writev)(fd, parts, size / 2), REAL(writev)(fd, parts, size)); }

int fsync(int fd) {
    const char *path = path_of(fd);
    if (watched(path)) { STOP("flush", path, 0, -1); forget(fd); }
    return REAL(fsync)(fd);
}
int fdatasync(int fd) {
    const char *path = path_of(fd);
    if (watched(path)) { STOP("flush", path, 0, -1); forget(fd); }
    return REAL(fdatasync)(fd);
}
int ftruncate(int fd, off_t size) {
    const char *path = path_of(fd);
    if (watched(path)) STOP("truncate", path, 0, -1);
    return REAL(ftruncate)(fd, size);
}
int ftruncate64(int fd, off64_t size) {
    const char *path = path_of(fd);
    if (watched(path)) STOP("truncate", path, 0, -1);
    return REAL(ftruncate64)(fd, size);
}

static void moved(const char *from, const char *to) {
    char under[PATH];
    size_t length = strlen(from);
    for (int i = 0; i < DIRTY; i++) /* a folder takes what lies in it along */
        if (!strncmp(dirty[i].path, from, length) && (!dirty[i].path[length] || dirty[i].path[length] == '/')) {
            snprintf(under, PATH, "%.*s%s", PATH / 2, to, dirty[i].path + length);
            memcpy(dirty[i].path, under, PATH);
        }
}
static int rename_at(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    char one[PATH], two[PATH];
    whole(from_folder, from, one);
    whole(to_folder, to, two);
    if (watched(two)) STOP("rename", two, 0, -1);
    int failed = flags ? REAL(renameat2)(from_folder, from, to_folder, to, flags) : REAL(renameat)(from_folder, from, to_folder, to);
    if (!failed && watched(two)) moved(one, two);
    return failed;
}
int rename(const char *from, const char *to) { return rename_at(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return rename_at(a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { return rename_at(a, from, b, to, flags); }

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    char one[PATH], two[PATH];
    whole(from_folder, from, one);
    whole(to_folder, to, two);
    if (watched(two)) STOP("link", two, 1, -1);
    int failed = REAL(linkat)(from_folder, from, to_folder, to, flags);
    if (!failed && watched(two)) moved(one, two); /* the name that stays */
    return failed;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int mkdirat(int folder, const char *path, mode_t mode) {
    char full[PATH];
    whole(folder, path, full);
    if (watched(full)) STOP("mkdir", full, 1, -1);
    return REAL(mkdirat)(folder, path, mode);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int unlinkat(int folder, const char *path, int flags) {
    char full[PATH];
    whole(folder, path, full);
    if (watched(full)) STOP("unlink", full, 0, -1);
    return REAL(unlinkat)(folder, path, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int statvfs(const char *path, struct statvfs *facts) {
    int failed = REAL(statvfs)(path, facts);
    if (!failed && page && page->full && watched(path)) {
        facts->f_bavail = facts->f_bfree = 0;
        refused();
    }
    return failed;
}
int statvfs64(const char *path, struct statvfs64 *facts) {
    int failed = REAL(statvfs64)(path, facts);
    if (!failed && page && page->full && watched(path)) {
        facts->f_bavail = facts->f_bfree = 0;
        refused();
    }
    return failed;
}
