//! The few system calls that the library makes, raw: they leave `errno` alone, and work in a
//! thread that has no thread-local storage of its own.

mod bytes;

use hecaton_uffd::Errno;
use hecaton_uffd::sys::syscall;
use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicU32;

/// Maps anonymous private memory.
pub(crate) fn map_anonymous(len: usize, prot: i32, extra_flags: i32) -> Result<usize, Errno> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra_flags;
    // SAFETY: a new mapping at a place of the kernel's choice touches nothing that exists.
    unsafe { syscall(libc::SYS_mmap, [0, len, prot as usize, flags as usize, usize::MAX, 0]) }
}

/// Changes the protection of memory that the caller owns.
///
/// # Safety
/// Nothing may rely on the old protection of the range.
pub(crate) unsafe fn protect(start: usize, len: usize, prot: i32) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { syscall(libc::SYS_mprotect, [start, len, prot as usize, 0, 0, 0]).map(drop) }
}

/// `madvise`.
///
/// # Safety
/// What `advice` does to the range must be right.
pub(crate) unsafe fn advise(start: usize, len: usize, advice: usize) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { syscall(libc::SYS_madvise, [start, len, advice, 0, 0, 0]).map(drop) }
}

/// Gives pages back: they read as zeros (or fault) afterwards.
///
/// # Safety
/// The contents of the range must not be needed.
pub(crate) unsafe fn dont_need(start: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { advise(start, len, libc::MADV_DONTNEED as usize) }
}

/// Sets bit 0 for each page from `first` that is in memory. False if that cannot be told.
pub(crate) fn residency(first: usize, pages: &mut [u8]) -> bool {
    let to = pages.as_mut_ptr() as usize;
    // SAFETY: the kernel writes one byte for each page.
    unsafe { syscall(libc::SYS_mincore, [first, pages.len() * 4096, to, 0, 0, 0]).is_ok() }
}

/// Sets the calling thread's signal mask, and returns what it was.
pub(crate) fn set_signal_mask(new: u64) -> u64 {
    change_signal_mask(libc::SIG_SETMASK, new).unwrap_or(0)
}

/// Adds signals to the calling thread's signal mask, and returns what it was. None if a filter of
/// system calls refuses that.
pub(crate) fn block_signals(more: u64) -> Option<u64> {
    change_signal_mask(libc::SIG_BLOCK, more)
}

fn change_signal_mask(how: libc::c_int, new: u64) -> Option<u64> {
    let mut old = 0u64;
    let (how, new, to) = (how as usize, &raw const new as usize, &raw mut old as usize);
    // SAFETY: both point to one word, the size of the kernel's signal set.
    let changed = unsafe { syscall(libc::SYS_rt_sigprocmask, [how, new, to, 8, 0, 0]) };
    changed.ok().map(|_| old)
}

/// Sleeps while `word` has this value, at most so long; may wake for no reason.
pub(crate) fn wait_while(word: &AtomicU32, value: u32, at_most_ms: u64) {
    let time = [at_most_ms / 1000, at_most_ms % 1000 * 1_000_000];
    let (at, time) = (std::ptr::from_ref(word) as usize, time.as_ptr() as usize);
    let wait = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel reads the word and the time.
    let _ = unsafe { syscall(libc::SYS_futex, [at, wait as usize, value as usize, time, 0, 0]) };
}

/// Wakes whoever sleeps in [`wait_while`].
pub(crate) fn wake_all(word: &AtomicU32) {
    let at = std::ptr::from_ref(word) as usize;
    let wake = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: touches no memory.
    let _ = unsafe { syscall(libc::SYS_futex, [at, wake as usize, i32::MAX as usize, 0, 0, 0]) };
}

/// Milliseconds since some moment.
pub(crate) fn now_ms() -> u64 {
    let mut time = [0u64; 2];
    let to = time.as_mut_ptr() as usize;
    // SAFETY: the kernel writes two words.
    let _ = unsafe {
        syscall(libc::SYS_clock_gettime, [libc::CLOCK_MONOTONIC as usize, to, 0, 0, 0, 0])
    };
    time[0] * 1000 + time[1] / 1_000_000
}

pub(crate) fn sleep_ms(milliseconds: u64) {
    wait_while(&AtomicU32::new(0), 0, milliseconds);
}

/// Unmaps memory.
///
/// # Safety
/// Nothing may use the range any more.
pub(crate) unsafe fn unmap(start: usize, len: usize) {
    // SAFETY: the caller's promise.
    let _ = unsafe { syscall(libc::SYS_munmap, [start, len, 0, 0, 0, 0]) };
}

pub(crate) fn close(fd: RawFd) {
    // SAFETY: closing a descriptor touches no memory.
    let _ = unsafe { syscall(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) };
}

pub(crate) fn process_id() -> i32 {
    // SAFETY: no arguments, no memory.
    unsafe { syscall(libc::SYS_getpid, [0; 6]).map_or(0, |pid| pid as i32) }
}

/// Whether orphans among this process's descendants become its children.
pub(crate) fn is_subreaper() -> bool {
    let mut is = 0i32;
    let (get, to) = (libc::PR_GET_CHILD_SUBREAPER as usize, &raw mut is as usize);
    // SAFETY: the kernel writes one number.
    let asked = unsafe { syscall(libc::SYS_prctl, [get, to, 0, 0, 0, 0]) };
    asked.is_ok() && is != 0
}

/// The inode of an open file.
pub(crate) fn file_number(fd: RawFd) -> Option<u64> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    let to = status.as_mut_ptr() as usize;
    // SAFETY: the kernel fills in the structure, for which zeros are valid, too.
    unsafe {
        syscall(libc::SYS_fstat, [fd as usize, to, 0, 0, 0, 0]).ok()?;
        Some(status.assume_init().st_ino)
    }
}

/// Another descriptor of the same open file, closed on exec.
pub(crate) fn duplicate(fd: RawFd) -> Result<RawFd, Errno> {
    let command = libc::F_DUPFD_CLOEXEC as usize;
    // SAFETY: numbers only.
    let made = unsafe { syscall(libc::SYS_fcntl, [fd as usize, command, 0, 0, 0, 0]) };
    made.map(|fd| fd as RawFd)
}

/// Writes a number at the place `at` of `to`, in decimal. Returns the place behind it.
pub(crate) fn write_decimal(to: &mut [u8], at: usize, number: i32) -> usize {
    let (mut end, mut rest) = (at, number.unsigned_abs());
    loop {
        to[end] = b'0' + (rest % 10) as u8;
        end += 1;
        rest /= 10;
        if rest == 0 {
            to[at..end].reverse();
            return end;
        }
    }
}

/// A pipe, closed on exec: the end to read from, and the other.
pub(crate) fn pipe() -> Result<[RawFd; 2], Errno> {
    let mut ends: [RawFd; 2] = [-1; 2];
    let to = ends.as_mut_ptr() as usize;
    // SAFETY: the kernel writes two numbers.
    let made = unsafe { syscall(libc::SYS_pipe2, [to, libc::O_CLOEXEC as usize, 0, 0, 0, 0]) };
    made.map(|_| ends)
}

/// Waits until a pipe has no writer any more, at most so many milliseconds; -1: not at all.
pub(crate) fn wait_for_end(pipe: RawFd, at_most_ms: usize) {
    if pipe >= 0 {
        let mut polled = libc::pollfd { fd: pipe, events: libc::POLLIN, revents: 0 };
        let at = &raw mut polled as usize;
        // SAFETY: one structure. Signals are blocked.
        let _ = unsafe { syscall(libc::SYS_poll, [at, 1, at_most_ms, 0, 0, 0]) };
    }
}

/// Opens a file to be read.
pub(crate) fn open(path: &CStr) -> Result<RawFd, Errno> {
    let (path, flags) = (path.as_ptr() as usize, (libc::O_RDONLY | libc::O_CLOEXEC) as usize);
    // SAFETY: the path is a C string.
    let opened =
        unsafe { syscall(libc::SYS_openat, [libc::AT_FDCWD as usize, path, flags, 0, 0, 0]) };
    opened.map(|fd| fd as RawFd)
}

/// Reads the target of the symbolic link at `path`, cut to the length of `name`.
pub(crate) fn read_link(path: &CStr, name: &mut [u8]) -> Result<usize, Errno> {
    let (path, to) = (path.as_ptr() as usize, name.as_mut_ptr() as usize);
    let here = libc::AT_FDCWD as usize;
    // SAFETY: the path is a C string, and the kernel writes at most the slice's length.
    unsafe { syscall(libc::SYS_readlinkat, [here, path, to, name.len(), 0, 0]) }
}

/// Gives a descriptor a high number, so that the program finds the low ones that it expects.
pub(crate) fn out_of_the_way(fd: RawFd) -> RawFd {
    let mut limit = [1024u64, 0];
    // SAFETY: the kernel writes two words, the structure's two members; fcntl touches no memory.
    let moved = unsafe {
        let to = limit.as_mut_ptr() as usize;
        let what = libc::RLIMIT_NOFILE as usize;
        let _ = syscall(libc::SYS_prlimit64, [0, what, 0, to, 0, 0]);
        let lowest = limit[0].clamp(64, 1 << 16) - 32;
        let command = libc::F_DUPFD_CLOEXEC as usize;
        syscall(libc::SYS_fcntl, [fd as usize, command, lowest as usize, 0, 0, 0])
    };
    let Ok(moved) = moved else { return fd };
    close(fd);
    moved as RawFd
}

pub(crate) fn thread_id() -> i32 {
    // SAFETY: no arguments, no memory.
    unsafe { syscall(libc::SYS_gettid, [0; 6]).map_or(0, |tid| tid as i32) }
}

pub(crate) fn read(fd: RawFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    loop {
        // SAFETY: the kernel writes at most the buffer's length.
        let result = unsafe {
            let at = buffer.as_mut_ptr() as usize;
            syscall(libc::SYS_read, [fd as usize, at, buffer.len(), 0, 0, 0])
        };
        if result != Err(Errno(libc::EINTR)) {
            return result;
        }
    }
}

/// Reads from the place `at` in a file.
pub(crate) fn read_at(fd: RawFd, buffer: &mut [u8], at: usize) -> Result<usize, Errno> {
    let to = buffer.as_mut_ptr() as usize;
    // SAFETY: the kernel writes at most the buffer's length.
    unsafe { syscall(libc::SYS_pread64, [fd as usize, to, buffer.len(), at, 0, 0]) }
}

/// Sends one packet; a peer that is gone is an error, not a signal.
pub(crate) fn send(fd: RawFd, bytes: &[u8]) -> Result<usize, Errno> {
    loop {
        // SAFETY: the kernel reads `bytes` only.
        let result = unsafe {
            let flags = libc::MSG_NOSIGNAL as usize;
            let at = bytes.as_ptr() as usize;
            syscall(libc::SYS_sendto, [fd as usize, at, bytes.len(), flags, 0, 0])
        };
        if result != Err(Errno(libc::EINTR)) {
            return result;
        }
    }
}

/// A packet connection to the Unix socket at `path`.
pub(crate) fn connect(path: &[u8]) -> Result<RawFd, Errno> {
    connect_as(libc::SOCK_SEQPACKET, path)
}

/// A stream connection to the Unix socket at `path`.
pub(crate) fn connect_stream(path: &[u8]) -> Result<RawFd, Errno> {
    connect_as(libc::SOCK_STREAM, path)
}

/// A packet connection to the Unix socket at the abstract address that is `path` after a zero.
pub(crate) fn connect_abstract(path: &[u8]) -> Result<RawFd, Errno> {
    connect_to(libc::SOCK_SEQPACKET, path, 1)
}

fn connect_as(kind: i32, path: &[u8]) -> Result<RawFd, Errno> {
    connect_to(kind, path, 0)
}

/// With so many zeros before the path. An abstract address ends where it ends; a path has zeros
/// after it.
fn connect_to(kind: i32, path: &[u8], zeros: usize) -> Result<RawFd, Errno> {
    // SAFETY: an all-zero sockaddr_un is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    if path.len() >= address.sun_path.len() {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    for (to, from) in address.sun_path[zeros..].iter_mut().zip(path) {
        *to = *from as libc::c_char;
    }
    // SAFETY: the address lives across the call; descriptors touch no memory.
    unsafe {
        let kind = kind | libc::SOCK_CLOEXEC;
        let fd = syscall(libc::SYS_socket, [libc::AF_UNIX as usize, kind as usize, 0, 0, 0, 0])?;
        let at = std::ptr::from_ref(&address) as usize;
        let len = match zeros {
            0 => size_of::<libc::sockaddr_un>(),
            zeros => std::mem::offset_of!(libc::sockaddr_un, sun_path) + zeros + path.len(),
        };
        let limit_sends = |tv_sec| {
            let limit = libc::timeval { tv_sec, tv_usec: 0 };
            let (level, name) = (libc::SOL_SOCKET as usize, libc::SO_SNDTIMEO as usize);
            let (at, len) = (&raw const limit as usize, size_of_val(&limit));
            let _ = syscall(libc::SYS_setsockopt, [fd, level, name, at, len, 0]);
        };
        if zeros > 0 {
            // To connect waits for those before, who may be strangers.
            limit_sends(2);
        }
        match syscall(libc::SYS_connect, [fd, at, len, 0, 0, 0]) {
            Ok(_) => {
                if zeros > 0 {
                    limit_sends(0);
                }
                Ok(fd as RawFd)
            }
            Err(error) => {
                close(fd as RawFd);
                Err(error)
            }
        }
    }
}

/// A message header with room for two descriptors, kept together so that its pointers stay valid.
#[repr(C, align(8))]
struct DescriptorSpace([u8; 24]);

/// Most descriptors beside a message.
const MAX_DESCRIPTORS: usize = 2;

/// Sends `bytes` with at most two descriptors beside them.
pub(crate) fn send_with_descriptors(
    socket: RawFd,
    bytes: &[u8],
    descriptors: &[RawFd],
) -> Result<(), Errno> {
    let descriptors = &descriptors[..descriptors.len().min(MAX_DESCRIPTORS)];
    let len = size_of_val(descriptors) as u32;
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut space = DescriptorSpace([0; 24]);
    // SAFETY: an all-zero msghdr is valid; the control buffer is large and aligned enough for two
    // descriptors, and everything pointed to outlives the call.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !descriptors.is_empty() {
            message.msg_control = space.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(len) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(len) as usize;
            let to = libc::CMSG_DATA(header);
            to.copy_from_nonoverlapping(descriptors.as_ptr().cast(), len as usize);
        }
        let at = &raw const message as usize;
        let flags = libc::MSG_NOSIGNAL as usize;
        syscall(libc::SYS_sendmsg, [socket as usize, at, flags, 0, 0, 0]).map(drop)
    }
}

/// Reads a packet, and the descriptor that may be beside it.
pub(crate) fn read_with_descriptor(
    socket: RawFd,
    bytes: &mut [u8],
) -> Result<(usize, Option<RawFd>), Errno> {
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut space = DescriptorSpace([0; 24]);
    // SAFETY: an all-zero msghdr is valid; the kernel writes `bytes` and the control buffer, which
    // is aligned for a header and outlives the call.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = space.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as usize;
        let (at, flags) = (&raw mut message as usize, libc::MSG_CMSG_CLOEXEC as usize);
        let read = loop {
            match syscall(libc::SYS_recvmsg, [socket as usize, at, flags, 0, 0, 0]) {
                Err(Errno(libc::EINTR)) => {}
                read => break read?,
            }
        };
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let is_descriptor = !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS;
        let fd = is_descriptor.then(|| libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned());
        Ok((read, fd))
    }
}

/// The user who listens where a socket is connected.
pub(crate) fn listeners_user(socket: RawFd) -> Result<u32, Errno> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: 0 };
    let mut len = size_of_val(&peer) as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET as usize, libc::SO_PEERCRED as usize);
    let (at, len) = (&raw mut peer as usize, &raw mut len as usize);
    // SAFETY: the kernel writes no more than the structure.
    unsafe { syscall(libc::SYS_getsockopt, [socket as usize, level, name, at, len, 0])? };
    Ok(peer.uid)
}
