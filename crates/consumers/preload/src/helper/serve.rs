//! Does what the pager asks of the helper.

use super::program::Program;
use crate::turn::{Act, Alone, Together};
use crate::{own, sys, withhold};
use hecaton_uffd::Uffd;
use hecaton_uffd::handover::{
    Answer, Command, HELD, MAGIC, MAX_RUNS, NEVER_HELD, Op, Range, Reply, command_len,
};
use std::os::fd::RawFd;

const PAGE: u64 = 4096;

/// The descriptors that the helper works with.
#[derive(Clone, Copy)]
pub(crate) struct Links {
    /// The connection to the pager.
    pub(crate) socket: RawFd,
    /// The program's userfaultfd, for as long as the program has memory.
    pub(crate) uffd: Uffd,
    /// The area's userfaultfd; `None` when the kernel cannot move pages.
    pub(crate) mover: Option<Uffd>,
    /// `/proc/self/maps`, which the helper opens, or -1.
    pub(crate) maps: RawFd,
}

/// Serves the pager until the program has ended or left its memory. Ends the program if the pager
/// is gone, and whoever might have started another: its next fault would wait for good, and nobody
/// else can name it without a risk of meeting a process that was given its number since.
pub(super) fn serve(links: &Links, program: &mut Program) {
    let mut helper = Helper { links, missed: false, held: None };
    let mut command = Command::new(Op::Barrier, 0);
    while program.wait_for(links.socket) {
        if !helper.obey(&mut command) {
            return program.end();
        }
    }
}

struct Helper<'a> {
    links: &'a Links,
    /// Memory was to be withheld while a fork was under way, which must not lose it.
    missed: bool,
    /// Until the next command that is answered.
    held: Option<Alone>,
}

impl Helper<'_> {
    /// Does what one command says. False if the connection has ended, or has brought what is no
    /// command.
    fn obey(&mut self, command: &mut Command) -> bool {
        // SAFETY: any bytes are a valid Command; `op` is compared, never transmuted.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(
                std::ptr::from_mut(command).cast::<u8>(),
                size_of::<Command>(),
            )
        };
        let Ok(read) = sys::read(self.links.socket, bytes) else { return false };
        if command.op == MAGIC && read == size_of::<Answer>() {
            // A successor was not sure that its predecessor had said it.
            return true;
        }
        let count = command.count as usize;
        if read < command_len(0) || count > MAX_RUNS || read != command_len(count) {
            return false;
        }
        let runs = &command.runs[..count];
        if command.op == Op::Clear as u32 {
            // If not, the next batch is not taken, either.
            clear(self.links.mover);
            return true;
        }
        if command.op == Op::Withhold as u32 {
            match Together::unless_forking() {
                Some(_held) => runs.iter().for_each(|&run| withhold::withhold(run)),
                None => {
                    runs.iter().for_each(|&run| withhold::withhold_from_cores(run));
                    self.missed = true;
                }
            }
            return true;
        }
        // Before a page of it goes. A fork that is still under way does it itself when it is over.
        if self.missed
            && let Some(_held) = Together::unless_forking()
        {
            withhold::resume_from(self.links.maps);
            self.missed = false;
        }
        self.answer(command)
    }

    /// Does what a command says that is answered. False if the connection has ended.
    fn answer(&mut self, command: &Command) -> bool {
        let runs = &command.runs[..command.count as usize];
        let mut reply = Reply { nonce: command.nonce, done: [0; MAX_RUNS] };
        let held = self.held.take();
        if command.op == Op::Hold as u32 {
            if own::is_bare() {
                reply.done[0] = NEVER_HELD;
            } else {
                self.held = held.or_else(|| Alone::try_new(Act::Other));
                reply.done[0] = if self.held.is_some() { HELD } else { 0 };
            }
        } else if command.op == Op::Take as u32 {
            drop(held);
            if let Some(_held) = Together::unless_pages_stay() {
                take(self.links, runs, &mut reply.done);
            }
        } else if let (Some(_held), true) = (held, command.op == Op::Drop as u32) {
            for (run, done) in runs.iter().zip(&mut reply.done) {
                // SAFETY: the pager has copied the pages and write-protected them.
                let dropped = unsafe { sys::dont_need(run.start as usize, run.len as usize) };
                *done = if dropped.is_ok() { (run.len / PAGE) as u32 } else { 0 };
            }
        }
        let length = size_of::<Reply>() - (MAX_RUNS - runs.len()) * size_of::<u32>();
        // SAFETY: a `repr(C)` structure of integers without padding.
        let bytes =
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(&reply).cast::<u8>(), length) };
        sys::send(self.links.socket, bytes).is_ok()
    }
}

/// Empties the area. False if that cannot be.
///
/// A bare program's is registered with the program's userfaultfd, so advice would raise an event
/// that is not read before the helper has answered. Its pages are moved to the bin first.
fn clear(mover: Option<Uffd>) -> bool {
    let mut at = own::area();
    if own::is_bare() {
        at = own::bin();
        let (bin, area) = (at as u64, own::area() as u64);
        if !mover.is_some_and(|mover| mover.move_what_is_there(bin, area, own::AREA as u64)) {
            return false;
        }
    }
    // A program that locks its memory (`mlockall`) locks the area, too.
    let advice = libc::MADV_DONTNEED_LOCKED as usize;
    // SAFETY: the pager has copied what it needs from the area before it says so.
    unsafe { sys::advise(at, own::AREA, advice) }.is_ok()
}

/// Moves each run to the place in the area that its position among the pages gives it, moved or
/// not: so the pager knows where each page went without being told.
///
/// Threads of a bare program may unmap a page meanwhile, and map another in its place before the
/// pager has read of it. So its own userfaultfd moves its pages: the kernel then moves none
/// (EAGAIN) from the moment of such a change until the pager has read of it.
fn take(links: &Links, runs: &[Range], done: &mut [u32; MAX_RUNS]) {
    // An area that is not empty gets no pages: nothing tells when its page came.
    let Some(mover) = links.mover.filter(|_| clear(links.mover)) else { return };
    let mover = if own::is_bare() { links.uffd } else { mover };
    let mut to = own::area() as u64;
    for (run, done) in runs.iter().zip(done) {
        *done = (mover.move_pages(to, run.start, run.len) / PAGE) as u32;
        to += run.len;
    }
}
