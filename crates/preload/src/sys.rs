//! The few system calls that the library makes, raw: they leave `errno` alone, and work in a
//! thread that has no thread-local storage of its own.

use hecaton_uffd::Errno;
use hecaton_uffd::sys::syscall;
use std::os::fd::RawFd;

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

/// Gives pages back: they read as zeros (or fault) afterwards.
///
/// # Safety
/// The contents of the range must not be needed.
pub(crate) unsafe fn dont_need(start: usize, len: usize) -> Result<(), Errno> {
    let advice = libc::MADV_DONTNEED as usize;
    // SAFETY: the caller's promise.
    unsafe { syscall(libc::SYS_madvise, [start, len, advice, 0, 0, 0]).map(drop) }
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

fn connect_as(kind: i32, path: &[u8]) -> Result<RawFd, Errno> {
    // SAFETY: an all-zero sockaddr_un is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    if path.len() >= address.sun_path.len() {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    for (to, from) in address.sun_path.iter_mut().zip(path) {
        *to = *from as libc::c_char;
    }
    // SAFETY: the address lives across the call; descriptors touch no memory.
    unsafe {
        let kind = kind | libc::SOCK_CLOEXEC;
        let fd = syscall(libc::SYS_socket, [libc::AF_UNIX as usize, kind as usize, 0, 0, 0, 0])?;
        let at = std::ptr::from_ref(&address) as usize;
        let len = size_of::<libc::sockaddr_un>();
        match syscall(libc::SYS_connect, [fd, at, len, 0, 0, 0]) {
            Ok(_) => Ok(fd as RawFd),
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

/// Receives one packet and the descriptor that came with it, if any.
pub(crate) fn receive_with_descriptor(
    socket: RawFd,
    bytes: &mut [u8],
) -> Result<(usize, Option<RawFd>), Errno> {
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut space = DescriptorSpace([0; 24]);
    // SAFETY: as in `send_with_descriptor`; the kernel writes within the lengths given.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = space.0.as_mut_ptr().cast();
        message.msg_controllen = space.0.len();
        let at = &raw mut message as usize;
        let flags = libc::MSG_CMSG_CLOEXEC as usize;
        let read = loop {
            match syscall(libc::SYS_recvmsg, [socket as usize, at, flags, 0, 0, 0]) {
                Err(Errno(libc::EINTR)) => {}
                result => break result?,
            }
        };
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let descriptor = (!header.is_null() && (*header).cmsg_type == libc::SCM_RIGHTS)
            .then(|| libc::CMSG_DATA(header).cast::<i32>().read_unaligned());
        Ok((read, descriptor))
    }
}
