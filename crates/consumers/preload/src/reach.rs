//! Reaches the pager and the kernel's userfaultfd, also as another user.
//!
//! A program may become another user (`su`, `setpriv`), or no longer see the pager's socket. Then
//! it can neither connect by the path nor open `/dev/userfaultfd`. So the pager listens at an
//! abstract address, too, where programs show the consumer's key, and gives them the device,
//! opened. Anybody can listen at such an address: only root, or this user, is believed.

use crate::failure::Failure;
use crate::{maps, sys};
use hecaton_uffd::bare::MAX_PATH;
use hecaton_uffd::handover::{Answer, Door, Knock, MAGIC, Step, Wish};
use hecaton_uffd::sys::syscall;
use hecaton_uffd::{Errno, Uffd};
use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

/// How often a pager that hangs up is asked again, and the pause: it may have been killed while its
/// successor takes over.
pub(crate) const TRIES: usize = 1000;
pub(crate) const PAUSE_MS: u64 = 10;

/// Set once at start; each fork needs it again. Zero-terminated by its initial value.
#[unsafe(link_section = ".data")]
static mut SOCKET_PATH: [u8; MAX_PATH] = [0; MAX_PATH];
#[unsafe(link_section = ".data")]
static mut DOOR: Option<Door> = None;
/// `/dev/userfaultfd`, opened by the pager, and what tells whether the number is still its.
#[unsafe(link_section = ".data")]
static DEVICE: AtomicI32 = AtomicI32::new(-1);
#[unsafe(link_section = ".data")]
static DEVICE_FILE: AtomicU64 = AtomicU64::new(0);

/// Notes where the pager is, and the consumer's key.
pub(crate) fn remember(path: &[u8], key: Option<&CStr>) -> Result<(), Failure> {
    if path.len() >= MAX_PATH {
        return Err(Failure("the pager's socket path is too long", Errno(libc::ENAMETOOLONG)));
    }
    // SAFETY: only the constructor writes it, before the program has a second thread.
    unsafe { (&raw mut SOCKET_PATH).cast::<u8>().copy_from(path.as_ptr(), path.len()) };
    // SAFETY: the same.
    unsafe { DOOR = key.and_then(|text| Door::of(text.to_bytes())) };
    Ok(())
}

/// A connection to the pager.
pub(crate) fn connect() -> Result<RawFd, Errno> {
    let path = path();
    for _ in 0..TRIES {
        let refused = match sys::connect(path.to_bytes()) {
            Ok(socket) => return Ok(socket),
            Err(refused) => refused,
        };
        if ![libc::EACCES, libc::EPERM, libc::ENOENT, libc::ENOTDIR].contains(&refused.0) {
            return Err(refused);
        }
        match knock(Wish::Attach) {
            Ok(socket) => return Ok(socket),
            Err(failure) if !is_hung_up(failure) => return Err(refused),
            Err(_) => sys::sleep_ms(PAUSE_MS),
        }
    }
    Err(Errno(libc::ECONNRESET))
}

/// Whether a pager has been killed, and another one may answer.
fn is_hung_up(failure: Errno) -> bool {
    matches!(failure.0, libc::EPIPE | libc::ECONNRESET | libc::EINTR)
}

/// Opens a userfaultfd of this process.
pub(crate) fn userfaultfd() -> Result<Uffd, Errno> {
    Uffd::open().or_else(|refused| {
        let known = DEVICE.load(Relaxed);
        if is_device(known)
            && let Ok(uffd) = Uffd::of_device(known)
        {
            return Ok(uffd);
        }
        Uffd::of_device(ask_for_device().ok_or(refused)?)
    })
}

struct Path([u8; MAX_PATH]);

impl Path {
    fn to_bytes(&self) -> &[u8] {
        let Path(bytes) = self;
        &bytes[..bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len())]
    }
}

fn path() -> Path {
    // SAFETY: written once, before any fork.
    Path(unsafe { (&raw const SOCKET_PATH).read() })
}

/// A connection to the pager's abstract address, on which the key has been shown. Not under a
/// filter of system calls, and not without `/proc`, where a child could not be followed.
fn knock(wish: Wish) -> Result<RawFd, Errno> {
    // SAFETY: written once, before any fork.
    let door = unsafe { DOOR };
    let Some(door) = door.filter(|_| !is_filtered() && maps::may_be_read().is_ok()) else {
        return Err(Errno(libc::ENOENT));
    };
    let socket = sys::connect_abstract(&door.name)?;
    let said = is_believed(socket).and_then(|()| {
        let knock = Knock { magic: MAGIC, wish: wish as u32, key: door.key };
        sys::send(socket, knock.as_bytes())
    });
    said.map(|_| socket).inspect_err(|_| sys::close(socket))
}

/// Whether root or this user listens there. In a user namespace all others have one number.
fn is_believed(socket: RawFd) -> Result<(), Errno> {
    const OVERFLOW: u32 = 65534;
    // SAFETY: no arguments, no memory.
    let own = unsafe { syscall(libc::SYS_geteuid, [0; 6])? } as u32;
    match sys::listeners_user(socket)? {
        0 => Ok(()),
        user if user == own && user != OVERFLOW => Ok(()),
        _ => Err(Errno(libc::EACCES)),
    }
}

/// Whether system calls are filtered: what is refused may be deadly to try in another way.
fn is_filtered() -> bool {
    // SAFETY: numbers only.
    let mode = unsafe { syscall(libc::SYS_prctl, [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0]) };
    mode != Ok(0)
}

/// Whether a descriptor is still what the pager has given: the program may have closed it.
fn is_device(fd: RawFd) -> bool {
    fd >= 0 && sys::file_number(fd) == Some(DEVICE_FILE.load(Relaxed))
}

fn ask_for_device() -> Option<RawFd> {
    for _ in 0..TRIES {
        let socket = match knock(Wish::Device) {
            Ok(socket) => socket,
            Err(failure) if is_hung_up(failure) => {
                sys::sleep_ms(PAUSE_MS);
                continue;
            }
            Err(_) => return None,
        };
        let mut bytes = [0u8; size_of::<Answer>()];
        let received = sys::read_with_descriptor(socket, &mut bytes);
        sys::close(socket);
        // SAFETY: any bytes are a valid Answer.
        let answer = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<Answer>()) };
        match received {
            // It was killed, or has too many who wait.
            Ok((0, _)) | Err(_) => sys::sleep_ms(PAUSE_MS),
            Ok((read, Some(device))) => {
                let is_answer = read == bytes.len() && answer.magic == MAGIC;
                let is_it = is_answer && answer.step == Step::Go as u32;
                if !is_it {
                    sys::close(device);
                    return None;
                }
                let device = sys::out_of_the_way(device);
                DEVICE_FILE.store(sys::file_number(device).unwrap_or(0), Relaxed);
                DEVICE.store(device, Relaxed);
                return Some(device);
            }
            Ok((_, None)) => return None,
        }
    }
    None
}
