//! Connecting an address space to its pager: at start, and in the child of a fork.

use crate::{helper, maps, sys};
use hecaton_uffd::abi::*;
use hecaton_uffd::handover::{Attach, MAGIC, MAX_RANGES, MAX_RUNS, Range, Welcome};
use hecaton_uffd::sys::syscall;
use hecaton_uffd::{Errno, Uffd};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

const PAGE: usize = 4096;
const AREA: usize = MAX_RUNS * PAGE;

/// The library's own memory, with an inaccessible page on either side so that the kernel does not
/// merge it with a neighbour:
/// guard, helper's stack, guard, area, doorbell, guard.
const AREA_AT: usize = PAGE + helper::STACK + PAGE;
const DOORBELL_AT: usize = AREA_AT + AREA;
const OWN: usize = DOORBELL_AT + PAGE + PAGE;

/// The process that is attached; another one finding this is a forked child that is not.
static ATTACHED_PID: AtomicI32 = AtomicI32::new(0);
/// The userfaultfd in the program's own table, for [`register`].
static UFFD: AtomicI32 = AtomicI32::new(-1);
static OWN_START: AtomicU64 = AtomicU64::new(0);
/// Set once at start; a child needs it again. Zero-terminated by its initial value.
static mut SOCKET_PATH: [u8; 108] = [0; 108];

/// What went wrong, and where.
pub(crate) struct Failure(&'static str, Errno);

impl Failure {
    /// Guest RAM would not be seen.
    pub(crate) const HYPERVISOR: Failure =
        Failure("guest RAM cannot be watched: libc's mmap cannot be replaced", Errno(libc::EPERM));

    /// A program that was asked to run on pool memory and cannot must not run on local memory
    /// unnoticed.
    pub(crate) fn report_and_exit(self) -> ! {
        let mut digits = [0u8; 12];
        let mut at = digits.len();
        let mut number = self.1.0.unsigned_abs();
        while at > 0 && (number > 0 || at == digits.len()) {
            at -= 1;
            digits[at] = b'0' + (number % 10) as u8;
            number /= 10;
        }
        for part in [b"hecaton: ", self.0.as_bytes(), b": error ", &digits[at..], b"\n"] {
            // SAFETY: the kernel reads within the slice.
            let _ = unsafe {
                syscall(libc::SYS_write, [2, part.as_ptr() as usize, part.len(), 0, 0, 0])
            };
        }
        loop {
            // SAFETY: ends the process.
            let _ = unsafe { syscall(libc::SYS_exit_group, [1, 0, 0, 0, 0, 0]) };
        }
    }
}

/// Whether a mapping of the calling process is registered as it is made.
pub(crate) fn is_attached() -> bool {
    ATTACHED_PID.load(Relaxed) == sys::process_id()
}

/// Registers memory that the program has just mapped. A range that cannot be registered (already
/// with another userfaultfd, or the program closed ours) simply stays local; the pager looks for
/// such ranges from outside.
pub(crate) fn register(start: u64, len: u64) {
    if !is_attached() {
        after_fork_in_child();
    }
    let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
    let _ = Uffd(UFFD.load(Relaxed)).register(start, len, mode);
}

fn open_uffd() -> Result<Uffd, Failure> {
    let refused = |errno| Failure("userfaultfd is not permitted to this program", errno);
    let uffd = out_of_the_way(Uffd::open().map_err(refused)?);
    match uffd.api(PAGER_FEATURES) {
        Ok(_) => Ok(uffd),
        Err(errno) => {
            sys::close(uffd.0);
            Err(Failure("following fork with userfaultfd needs CAP_SYS_PTRACE", errno))
        }
    }
}

/// A high descriptor number, so that the program finds the low ones it expects.
pub(crate) fn out_of_the_way(uffd: Uffd) -> Uffd {
    let mut limit = libc::rlimit { rlim_cur: 1024, rlim_max: 0 };
    // SAFETY: getrlimit writes the structure; fcntl touches no memory.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        let lowest = limit.rlim_cur.clamp(64, 1 << 16) - 32;
        let command = libc::F_DUPFD_CLOEXEC as usize;
        match syscall(libc::SYS_fcntl, [uffd.0 as usize, command, lowest as usize, 0, 0, 0]) {
            Ok(high) => {
                sys::close(uffd.0);
                Uffd(high as RawFd)
            }
            Err(_) => uffd,
        }
    }
}

/// The area's own userfaultfd: it has no event features, so that emptying the area raises none.
/// `None` when the kernel cannot move pages.
fn open_area(area: u64) -> Option<Uffd> {
    let uffd = Uffd::open().ok()?;
    let ready = uffd.api(UFFD_FEATURE_MOVE).is_ok()
        && uffd.register(area, AREA as u64, UFFDIO_REGISTER_MODE_MISSING).is_ok();
    if !ready {
        sys::close(uffd.0);
    }
    ready.then_some(uffd)
}

/// Attaches a program that has just started.
pub(crate) fn fresh(path: &[u8]) -> Result<(), Failure> {
    if path.len() >= 108 {
        return Err(Failure("the pager's socket path is too long", Errno(libc::ENAMETOOLONG)));
    }
    // SAFETY: only the constructor writes it, before the program has a second thread.
    unsafe { (&raw mut SOCKET_PATH).cast::<u8>().copy_from(path.as_ptr(), path.len()) };

    let own = sys::map_anonymous(OWN, libc::PROT_NONE, libc::MAP_NORESERVE)
        .map_err(|errno| Failure("no memory for the pager's helper", errno))?;
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: parts of the mapping just made.
    unsafe {
        let opened = sys::protect(own + PAGE, helper::STACK, writable)
            .and_then(|()| sys::protect(own + AREA_AT, AREA + PAGE, writable));
        opened.map_err(|errno| Failure("no memory for the pager's helper", errno))?;
    }
    OWN_START.store(own as u64, Relaxed);

    let uffd = open_uffd()?;
    let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
    let own_range = Range { start: own as u64, len: OWN as u64 };
    uffd.register((own + DOORBELL_AT) as u64, PAGE as u64, mode)
        .map_err(|errno| Failure("userfaultfd refuses to register memory", errno))?;
    let mut ranges = [Range::default(); MAX_RANGES];
    let mut range_count = 0;
    maps::for_each_pageable(own_range, |range| {
        if range_count < MAX_RANGES && uffd.register(range.start, range.len, mode).is_ok() {
            ranges[range_count] = range;
            range_count += 1;
        }
    });
    UFFD.store(uffd.0, Relaxed);
    connect(Some(uffd), ranges, range_count)
}

/// The child of a fork: its memory is registered already (the kernel gave the pager a descriptor
/// for it), but it has no helper, and the descriptors it inherited are its parent's.
pub(crate) extern "C" fn after_fork_in_child() {
    if is_attached() {
        return;
    }
    sys::close(UFFD.swap(-1, Relaxed));
    let area = OWN_START.load(Relaxed) as usize + AREA_AT;
    // SAFETY: whatever the parent's helper had in the area is the parent's.
    let _ = unsafe { sys::dont_need(area, AREA) };
    if let Err(failure) = connect(None, [Range::default(); MAX_RANGES], 0) {
        failure.report_and_exit();
    }
}

fn connect(
    uffd: Option<Uffd>,
    ranges: [Range; MAX_RANGES],
    range_count: usize,
) -> Result<(), Failure> {
    let own = OWN_START.load(Relaxed);
    let area = own + AREA_AT as u64;
    let doorbell = own + DOORBELL_AT as u64;
    let mover = open_area(area);
    // SAFETY: written once, before any fork.
    let path: [u8; 108] = unsafe { (&raw const SOCKET_PATH).read() };
    let length = path.iter().position(|&b| b == 0).unwrap_or(path.len());
    let socket = sys::connect(&path[..length])
        .map_err(|errno| Failure("the pager cannot be reached", errno))?;
    let attach = Attach {
        magic: MAGIC,
        forked: u32::from(uffd.is_none()),
        pid: sys::process_id(),
        range_count: range_count as u32,
        area: if mover.is_some() { area } else { 0 },
        doorbell,
        own: Range { start: own, len: OWN as u64 },
        ranges,
    };
    // SAFETY: a `repr(C)` structure of integers without padding.
    let bytes = unsafe {
        std::slice::from_raw_parts(std::ptr::from_ref(&attach).cast::<u8>(), size_of::<Attach>())
    };
    let lost = |errno| Failure("the pager hung up", errno);
    sys::send_with_descriptors(socket, bytes, uffd.map(|uffd| uffd.0).as_slice()).map_err(lost)?;
    if uffd.is_none() {
        // The pager learns from this fault's thread id which of the descriptors that the kernel
        // delivered is ours.
        // SAFETY: the doorbell is a readable page of our own.
        unsafe { std::ptr::read_volatile(doorbell as *const u8) };
    }
    let mut answer = [0u8; size_of::<Welcome>()];
    let (read, descriptor) = sys::receive_with_descriptor(socket, &mut answer).map_err(lost)?;
    // SAFETY: any bytes are a valid Welcome.
    let welcome = unsafe { std::ptr::read_unaligned(answer.as_ptr().cast::<Welcome>()) };
    if read != answer.len() || welcome.magic != MAGIC {
        return Err(Failure("the pager is of another version", Errno(libc::EPROTO)));
    }
    if let Some(own_uffd) = descriptor {
        UFFD.store(out_of_the_way(Uffd(own_uffd)).0, Relaxed);
        // The next generation needs a doorbell that is missing again. The pager is reading events.
        // SAFETY: the doorbell holds nothing.
        let _ = unsafe { sys::dont_need(doorbell as usize, PAGE) };
    }
    // SAFETY: prctl takes numbers only. Without Yama it fails, and is not needed.
    let _ = unsafe {
        let reader = welcome.reader as usize;
        syscall(libc::SYS_prctl, [libc::PR_SET_PTRACER as usize, reader, 0, 0, 0, 0])
    };
    ATTACHED_PID.store(sys::process_id(), Relaxed);
    let stack_top = own as usize + PAGE + helper::STACK;
    let started = helper::start(stack_top, socket, mover, area);
    sys::close(socket);
    if let Some(mover) = mover {
        sys::close(mover.0);
    }
    started.map_err(|errno| Failure("the helper thread cannot be started", errno))
}
