//! Talks to the helper of a program.

use crate::programs::remote;
use hecaton_uffd::handover::{Attach, Command, MAX_RUNS, Op, Range, Reply};
use std::os::fd::RawFd;

/// The helper of a program: what it can be asked through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Helper {
    /// The connection to it.
    pub(crate) socket: RawFd,
    /// Where it moves pages to; 0 when the kernel cannot.
    pub(crate) area: u64,
    /// Memory of the library's own, left alone.
    pub(crate) own: Range,
    /// Where the library keeps its table of other memory to leave alone, and the table's entries.
    pub(crate) left_alone: u64,
    pub(crate) left_alone_count: usize,
}

impl Helper {
    pub(crate) const NONE: Helper = Helper {
        socket: -1,
        area: 0,
        own: Range { start: 0, len: 0 },
        left_alone: 0,
        left_alone_count: 0,
    };

    /// A child's before it has attached.
    pub(crate) fn only_connection(socket: RawFd) -> Helper {
        Helper { socket, ..Helper::NONE }
    }

    /// As its library describes it.
    pub(crate) fn of(attach: &Attach, socket: RawFd) -> Helper {
        let Attach { area, own, left_alone, left_alone_count, .. } = *attach;
        Helper { socket, area, own, left_alone, left_alone_count: left_alone_count as usize }
    }

    /// Whether its end of the connection is closed.
    pub(crate) fn has_ended(&self) -> bool {
        has_ended(self.socket, std::time::Duration::ZERO)
    }

    /// Ranges that the program does not want registered, at this moment.
    pub(crate) fn read_left_alone(&self, pid: i32) -> Vec<Range> {
        let mut table = vec![Range::default(); self.left_alone_count.min(MAX_LEFT_ALONE)];
        let len = size_of_val(&table[..]);
        let to = libc::iovec { iov_base: table.as_mut_ptr().cast(), iov_len: len };
        let from = libc::iovec { iov_base: self.left_alone as *mut _, iov_len: len };
        // SAFETY: any bytes are valid ranges, and the table is the library's, never paged.
        let read = unsafe { remote::read(pid, &[to], &[from]) };
        table.retain(|range| read && range.len > 0);
        table.push(self.own);
        table
    }
}

/// More entries are not believed.
const MAX_LEFT_ALONE: usize = 1 << 16;

/// The helper is gone, and with it the memory of the program, which ended, or called `exec`; or
/// somebody has killed the helper.
#[derive(Debug)]
pub(crate) struct Gone;

/// Sends a command without waiting for anything.
pub(crate) fn send(socket: RawFd, command: &Command) -> Result<(), Gone> {
    let bytes = command.as_bytes();
    loop {
        // SAFETY: the kernel reads the command's bytes.
        let sent =
            unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
        if sent == bytes.len() as isize {
            return Ok(());
        }
        if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return Err(Gone);
        }
    }
}

/// Sends a command if that takes no waiting. False if it does, or the helper is gone.
pub(crate) fn try_send(socket: RawFd, command: &Command) -> bool {
    let (bytes, flags) = (command.as_bytes(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
    // SAFETY: the kernel reads the command's bytes.
    let sent = unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), flags) };
    sent == bytes.len() as isize
}

/// Waits until the helper has done everything that was asked of it before. Whenever `uffd` has
/// something to say, `read_events` is called: the helper may be waiting for that.
pub(crate) fn barrier(
    socket: RawFd,
    uffd: RawFd,
    mut read_events: impl FnMut(),
) -> Result<(), Gone> {
    send(socket, &Command::new(Op::Barrier, BARRIER_NONCE))?;
    loop {
        let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut polled = [poll(socket), poll(uffd)];
        // SAFETY: two structures, as said.
        unsafe { libc::poll(polled.as_mut_ptr(), 2, -1) };
        if polled[1].revents != 0 {
            read_events();
        }
        if polled[0].revents != 0 && receive(socket)?.nonce == BARRIER_NONCE {
            return Ok(());
        }
    }
}

/// No other command has it: the others count up from 1.
const BARRIER_NONCE: u64 = u64::MAX;

/// Has `op` done on `runs`, and waits. Returns the pages done of each run.
pub(crate) fn ask(socket: RawFd, op: Op, runs: &[Range], nonce: u64) -> Result<Vec<u32>, Gone> {
    let mut command = Command::new(op, nonce);
    command.runs[..runs.len()].copy_from_slice(runs);
    command.count = runs.len() as u32;
    send(socket, &command)?;
    loop {
        let reply = receive(socket)?;
        // An answer to a predecessor's command has another nonce.
        if reply.nonce == nonce {
            return Ok(reply.done[..runs.len()].to_vec());
        }
    }
}

/// Whether the helper's end of the connection closes within `patience`.
pub(crate) fn has_ended(socket: RawFd, patience: std::time::Duration) -> bool {
    let mut polled = libc::pollfd { fd: socket, events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one structure, as said.
    unsafe { libc::poll(&raw mut polled, 1, patience.as_millis() as i32) == 1 }
}

fn receive(socket: RawFd) -> Result<Reply, Gone> {
    let mut reply = Reply { nonce: 0, done: [0; MAX_RUNS] };
    loop {
        // SAFETY: any bytes are a valid Reply, and the kernel writes at most its size.
        let read = unsafe { libc::recv(socket, (&raw mut reply).cast(), size_of::<Reply>(), 0) };
        if read > 0 {
            return Ok(reply);
        }
        let error = std::io::Error::last_os_error();
        if read == 0 || error.kind() != std::io::ErrorKind::Interrupted {
            return Err(Gone);
        }
    }
}
