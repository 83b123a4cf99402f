//! Connecting an address space to its pager: at start, and in the child of a fork.

use crate::failure::Failure;
use crate::helper::Links;
use crate::own::{self, AREA, LEFT_ALONE, RANGES};
use crate::withhold::{self, withhold};
use crate::{helper, maps, reach, sys};
use hecaton_uffd::abi::*;
use hecaton_uffd::bare::{MAX_PATH, Place};
use hecaton_uffd::handover::{
    Answer, Attach, Kind, MAGIC, MAX_RANGES, Range, Step, USES_WIPE_ON_FORK,
};
use hecaton_uffd::sys::syscall;
use hecaton_uffd::{Errno, Uffd};
use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// The userfaultfd in the program's own table, for [`register`].
#[unsafe(link_section = ".data")]
static UFFD: AtomicI32 = AtomicI32::new(-1);
/// Ends a process whose memory was copied past [`crate::fork`]: it lacks what its parent has in the
/// pool, and would find zeros in its place if it were let map memory there.
pub(crate) fn end_if_copied_unseen() {
    if own::attached().load(Relaxed) == 0 && !own::is_unpaged() {
        let what = "this process was forked by a bare system call, which cannot be followed";
        Failure(what, Errno(libc::ENOTSUP)).report_and_exit();
    }
}

/// Registers memory that the program has just mapped. A range that cannot be registered (already
/// with another userfaultfd, the program closed ours, or a filter may forbid it) simply stays
/// local; the pager looks for such ranges from outside.
pub(crate) fn register(start: u64, len: u64) {
    if own::is_unpaged() {
        return;
    }
    end_if_copied_unseen();
    if own::is_filtered() {
        return;
    }
    withhold(Range { start, len });
    let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
    let _ = Uffd(UFFD.load(Relaxed)).register(start, len, mode);
}

const NOT_PERMITTED: fn(Errno) -> Failure = |errno| {
    let what = "userfaultfd is not permitted to this program: as root, run \
                `sysctl vm.unprivileged_userfaultfd=1` or `chmod 666 /dev/userfaultfd`";
    Failure(what, errno)
};

/// Whether a child can open a userfaultfd as it must: this process may have given up the right
/// since it started, or have left `/dev` behind.
pub(crate) fn may_be_followed() -> Result<(), Failure> {
    reach::userfaultfd().map(|uffd| sys::close(uffd.0)).map_err(NOT_PERMITTED)?;
    // The child looks for its mappings there.
    maps::may_be_read().map_err(|errno| Failure("/proc/self/maps is not to be seen", errno))
}

fn open_uffd() -> Result<Uffd, Failure> {
    let uffd = Uffd(sys::out_of_the_way(reach::userfaultfd().map_err(NOT_PERMITTED)?.0));
    let ready = match own::is_bare() {
        false => uffd.api(PAGER_FEATURES),
        // Its pages are moved by this descriptor: see `serve`.
        true => uffd.api(PAGER_FEATURES | UFFD_FEATURE_MOVE).and_then(|features| {
            let (area, len) = (own::area() as u64, AREA as u64);
            uffd.register(area, len, UFFDIO_REGISTER_MODE_MISSING).map(|()| features)
        }),
    };
    match ready {
        Ok(_) => Ok(uffd),
        Err(errno) => {
            sys::close(uffd.0);
            let what = match own::is_bare() {
                false => "this kernel's userfaultfd lacks what paging needs",
                true => "a program without glibc takes a kernel that moves pages (Linux 6.8)",
            };
            Err(Failure(what, errno))
        }
    }
}

/// The area's own userfaultfd (a bare program's bin's): it has no event features, so that emptying
/// the area raises none. `None` when the kernel cannot move pages.
fn open_area() -> Option<Uffd> {
    let uffd = reach::userfaultfd().ok()?;
    let at = if own::is_bare() { own::bin() } else { own::area() };
    let ready = uffd.api(UFFD_FEATURE_MOVE).is_ok()
        && uffd.register(at as u64, AREA as u64, UFFDIO_REGISTER_MODE_MISSING).is_ok();
    if !ready {
        sys::close(uffd.0);
    }
    ready.then_some(uffd)
}

/// A program that the pager has welcomed, and whose helper is to be started.
pub(crate) struct Fresh {
    socket: RawFd,
    mover: Option<Uffd>,
}

/// Attaches a program that has just started. After an error its memory is as it was.
pub(crate) fn fresh(path: &[u8], key: Option<&CStr>) -> Result<Fresh, Failure> {
    reach::remember(path, key)?;
    own::map().map_err(NO_MEMORY)?;
    fresh_with_own_memory()
}

/// Attaches a bare program. After an error its memory is as it was.
pub(crate) fn bare(place: &Place) -> Result<(), Failure> {
    let length = place.socket.iter().position(|&byte| byte == 0).unwrap_or(MAX_PATH);
    reach::remember(&place.socket[..length], None)?;
    own::map_in(place).map_err(NO_MEMORY)?;
    begin(fresh_with_own_memory()?)
}

const NO_MEMORY: fn(Errno) -> Failure = |errno| Failure("no memory for the pager's helper", errno);

fn fresh_with_own_memory() -> Result<Fresh, Failure> {
    let uffd = open_uffd()?;
    let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
    let mut attach = introduction(Kind::Program);
    maps::for_each_pageable(own::range(), |range| {
        let count = attach.range_count as usize;
        if count == MAX_RANGES {
            return;
        }
        withhold(range);
        if uffd.register(range.start, range.len, mode).is_ok() {
            attach.ranges[count] = range;
            attach.range_count += 1;
        }
    });
    UFFD.store(uffd.0, Relaxed);
    let mover = open_area();
    attach.area = mover.map_or(0, |_| own::area() as u64);
    may_be_read();
    let welcomed = ask(&attach, Some(uffd)).and_then(|(socket, step)| match step {
        Step::Welcome => Ok(socket),
        _ => {
            sys::close(socket);
            Err(REFUSED)
        }
    });
    match welcomed {
        Ok(socket) => Ok(Fresh { socket, mover }),
        Err(failure) => {
            UFFD.store(-1, Relaxed);
            sys::close(uffd.0);
            if let Some(mover) = mover {
                sys::close(mover.0);
            }
            // Read a moment ago; children would lack the memory that is listed.
            let _ = withhold::suspend();
            Err(failure)
        }
    }
}

/// Starts the helper of a program that has just started.
pub(crate) fn begin(Fresh { socket, mover }: Fresh) -> Result<(), Failure> {
    attached(socket, mover)
}

/// Attaches the child of a fork; `connection` was opened by its parent, for it. Calls `welcomed` as
/// soon as the child's memory is served.
///
/// Until this returns, nothing but [`own`] memory may be touched: the kernel has taken the parent's
/// userfaultfd off the child's mappings, and a page that is in the pool reads as zeros.
pub(crate) fn child(connection: RawFd, welcomed: impl FnOnce()) -> Result<(), Failure> {
    sys::close(UFFD.swap(-1, Relaxed));
    maps::forget_parents();
    helper::let_go_of_parents_lifeline();
    // SAFETY: whatever the parent's helper had in the area is the parent's.
    let _ = unsafe { sys::dont_need(own::area(), AREA) };
    let uffd = open_uffd()?;
    UFFD.store(uffd.0, Relaxed);
    let mover = open_area();
    let mut attach = introduction(Kind::Child);
    attach.area = mover.map_or(0, |_| own::area() as u64);
    may_be_read();
    say(connection, &attach, Some(uffd)).map_err(HUNG_UP)?;
    loop {
        match answer(connection)? {
            Step::Welcome => {
                welcomed();
                return attached(connection, mover);
            }
            // Its successor has not heard it.
            Step::Go => say(connection, &attach, Some(uffd)).map_err(HUNG_UP)?,
            Step::Refused | Step::Again => return Err(REFUSED),
        }
    }
}

/// In the child of a fork that was not followed. With CLONE_FILES the parent's descriptors are in
/// the same table, and stay.
pub(crate) fn stay_local(shares_descriptors: bool) {
    own::become_unpaged();
    let uffd = UFFD.swap(-1, Relaxed);
    if !shares_descriptors && uffd >= 0 {
        sys::close(uffd);
        maps::forget_parents();
        helper::let_go_of_parents_lifeline();
    }
}

/// Tells the pager that this process is about to fork. Once this has returned, the pager leaves the
/// process's memory as it is, and serves none of its faults, until the child has attached through
/// the connection returned or all copies of that are closed. `None`: one of the pages `written` is
/// not in memory any more, or a write to it would be a fault.
pub(crate) fn announce_fork(written: &[usize]) -> Result<Option<RawFd>, Failure> {
    let mut attach = introduction(Kind::Fork);
    for (range, &page) in attach.ranges.iter_mut().zip(written) {
        *range = Range { start: page as u64, len: own::PAGE as u64 };
        attach.range_count += 1;
    }
    let (socket, step) = ask(&attach, None)?;
    if step == Step::Go {
        return Ok(Some(socket));
    }
    sys::close(socket);
    if step == Step::Again { Ok(None) } else { Err(REFUSED) }
}

fn introduction(kind: Kind) -> Attach {
    Attach {
        magic: MAGIC,
        kind: kind as u32,
        range_count: 0,
        left_alone_count: RANGES as u32,
        area: 0,
        own: own::range(),
        left_alone: LEFT_ALONE.entries().as_ptr() as u64,
        flags: if own::uses_wipe_on_fork() { USES_WIPE_ON_FORK } else { 0 },
        ranges: [Range::default(); MAX_RANGES],
    }
}

/// With Yama, other processes of the same user may read this one's memory only if it says so. The
/// pager that is attached to is not named: another may take over from it.
fn may_be_read() {
    // SAFETY: prctl takes numbers only. Without Yama it fails, and is not needed.
    let _ = unsafe {
        let any = libc::PR_SET_PTRACER_ANY as usize;
        syscall(libc::SYS_prctl, [libc::PR_SET_PTRACER as usize, any, 0, 0, 0, 0])
    };
}

const HUNG_UP: fn(Errno) -> Failure = |errno| Failure("the pager hung up", errno);
const REFUSED: Failure = Failure("the pager refuses this process", Errno(libc::EAGAIN));

/// Says `attach` on a connection of its own, which is returned with the pager's answer.
fn ask(attach: &Attach, uffd: Option<Uffd>) -> Result<(RawFd, Step), Failure> {
    for attempt in 1.. {
        let socket =
            reach::connect().map_err(|errno| Failure("the pager cannot be reached", errno))?;
        let heard = say(socket, attach, uffd).map_err(HUNG_UP).and_then(|()| answer(socket));
        match heard {
            Ok(step) => return Ok((socket, step)),
            Err(failure) if attempt == reach::TRIES => {
                sys::close(socket);
                return Err(failure);
            }
            Err(_) => sys::close(socket),
        }
        sys::sleep_ms(reach::PAUSE_MS);
    }
    Err(REFUSED)
}

fn say(socket: RawFd, attach: &Attach, uffd: Option<Uffd>) -> Result<(), Errno> {
    sys::send_with_descriptors(socket, attach.as_bytes(), uffd.map(|uffd| uffd.0).as_slice())
}

fn answer(socket: RawFd) -> Result<Step, Failure> {
    let mut bytes = [0u8; size_of::<Answer>()];
    let read = sys::read(socket, &mut bytes).map_err(HUNG_UP)?;
    if read == 0 {
        return Err(HUNG_UP(Errno(libc::ECONNRESET)));
    }
    // SAFETY: any bytes are a valid Answer.
    let answer = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<Answer>()) };
    let steps = [Step::Go, Step::Welcome, Step::Refused, Step::Again];
    let step = steps.into_iter().find(|&step| step as u32 == answer.step);
    step.filter(|_| read == bytes.len() && answer.magic == MAGIC)
        .ok_or(Failure("the pager is of another version", Errno(libc::EPROTO)))
}

/// The pager serves this address space: starts the helper, whose connection `socket` becomes.
fn attached(socket: RawFd, mover: Option<Uffd>) -> Result<(), Failure> {
    own::attached().store(1, Relaxed);
    let uffd = Uffd(UFFD.load(Relaxed));
    let started = helper::start(Links { socket, uffd, mover, maps: -1 });
    for fd in [socket, mover.map_or(-1, |mover| mover.0)] {
        if fd >= 0 {
            sys::close(fd);
        }
    }
    maps::keep();
    started.map_err(|errno| Failure("the helper cannot be started", errno))
}
