//! Talks to the helper of a program.

use crate::programs::remote;
use hecaton_uffd::Uffd;
use hecaton_uffd::handover::{Attach, Command, MAX_RUNS, Op, Range, Reply};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

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

    /// Whether nobody has its end of the connection any more.
    pub(crate) fn has_hung_up(&self) -> bool {
        waits(self.socket, libc::POLLRDHUP, Duration::ZERO)
    }

    /// To ask it something; `uffd` is its program's.
    pub(crate) fn line(&self, uffd: Uffd) -> Line {
        Line { socket: self.socket, uffd }
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

/// The connection to a helper, and the userfaultfd of the memory that it shares with its program.
///
/// The connection alone does not tell that a child has ended. Its parent has a copy of the child's
/// end until the parent's own system call returns, and may wait for a page meanwhile. So its memory
/// is looked at, too.
#[derive(Clone, Copy)]
pub(crate) struct Line {
    socket: RawFd,
    uffd: Uffd,
}

/// How long a helper may be silent before its memory is looked at.
const LOOK_AFTER: Duration = Duration::from_millis(50);

impl Line {
    /// Whether the helper ends within `patience`.
    pub(crate) fn ends_within(self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if waits(self.socket, libc::POLLRDHUP, left.min(LOOK_AFTER))
                || self.uffd.has_lost_memory()
            {
                return true;
            }
            if left.is_zero() {
                return false;
            }
        }
    }

    /// Waits until the helper has done everything that was asked of it before. Whenever `events`
    /// has something to say, `read_events` is called: the helper may be waiting for that.
    pub(crate) fn barrier(
        self,
        events: Option<Uffd>,
        mut read_events: impl FnMut(),
    ) -> Result<(), Gone> {
        send(self.socket, &Command::new(Op::Barrier, BARRIER_NONCE))?;
        let events = events.map_or(-1, |uffd| uffd.0);
        loop {
            let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            let mut polled = [poll(self.socket), poll(events)];
            // SAFETY: two structures, as said.
            let ready =
                unsafe { libc::poll(polled.as_mut_ptr(), 2, LOOK_AFTER.as_millis() as i32) };
            if polled[1].revents != 0 {
                read_events();
            }
            if polled[0].revents != 0 && self.receive()?.nonce == BARRIER_NONCE {
                return Ok(());
            }
            if ready == 0 && self.uffd.has_lost_memory() {
                return Err(Gone);
            }
        }
    }

    /// Has `op` done on `runs`, and waits. Returns the pages done of each run.
    pub(crate) fn ask(self, op: Op, runs: &[Range], nonce: u64) -> Result<Vec<u32>, Gone> {
        let mut command = Command::new(op, nonce);
        command.runs[..runs.len()].copy_from_slice(runs);
        command.count = runs.len() as u32;
        send(self.socket, &command)?;
        loop {
            let reply = self.receive()?;
            // An answer to a predecessor's command has another nonce.
            if reply.nonce == nonce {
                return Ok(reply.done[..runs.len()].to_vec());
            }
        }
    }

    fn receive(self) -> Result<Reply, Gone> {
        let mut reply = Reply { nonce: 0, done: [0; MAX_RUNS] };
        loop {
            while !waits(self.socket, libc::POLLIN, LOOK_AFTER) {
                if self.uffd.has_lost_memory() {
                    return Err(Gone);
                }
            }
            let to = (&raw mut reply).cast();
            // SAFETY: any bytes are a valid Reply, and the kernel writes at most its size.
            let read = unsafe { libc::recv(self.socket, to, size_of::<Reply>(), 0) };
            if read > 0 {
                return Ok(reply);
            }
            let error = std::io::Error::last_os_error();
            if read == 0 || error.kind() != std::io::ErrorKind::Interrupted {
                return Err(Gone);
            }
        }
    }
}

/// No other command has it: the others count up from 1.
const BARRIER_NONCE: u64 = u64::MAX;

/// Whether something of `events` waits at the socket, or comes within `patience`.
fn waits(socket: RawFd, events: libc::c_short, patience: Duration) -> bool {
    let mut polled = libc::pollfd { fd: socket, events, revents: 0 };
    // SAFETY: one structure, as said.
    unsafe { libc::poll(&raw mut polled, 1, patience.as_millis() as i32) == 1 }
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

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_memory::PAGE_SIZE;
    use hecaton_uffd::abi::UFFDIO_REGISTER_MODE_MISSING;
    use hecaton_uffd::sys::NOWHERE;
    use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;

    /// In a child that was forked: has memory at [`NOWHERE`], registers it, says the descriptor's
    /// number, and waits.
    fn be_a_child(says: RawFd) -> ! {
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
        );
        let at = NOWHERE as *mut libc::c_void;
        // SAFETY: a new mapping where there is none; system calls only, as a forked child may.
        unsafe {
            let mapped = libc::mmap(at, PAGE_SIZE, protection, flags, -1, 0) == at;
            let uffd = Uffd::open().ok().filter(|uffd| uffd.api(0).is_ok());
            let registered = uffd.filter(|uffd| {
                let mode = UFFDIO_REGISTER_MODE_MISSING;
                uffd.register(NOWHERE, PAGE_SIZE as u64, mode).is_ok()
            });
            let fd = registered.filter(|_| mapped).map_or(-1, |uffd| uffd.0);
            libc::write(says, (&raw const fd).cast(), size_of::<RawFd>());
            loop {
                libc::pause();
            }
        }
    }

    /// As a child's parent does while it waits for a page: it holds a copy of the child's end of
    /// the connection.
    #[test]
    fn a_helper_has_ended_although_another_holds_its_connection() {
        let (mut hears, says) = std::io::pipe().unwrap();
        // SAFETY: the child makes system calls only.
        let child = unsafe { libc::fork() };
        if child == 0 {
            be_a_child(says.as_raw_fd());
        }
        let mut number = [0u8; size_of::<RawFd>()];
        hears.read_exact(&mut number).unwrap();
        let end = || {
            // SAFETY: the child of this process, not waited for yet.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        };
        let number = RawFd::from_ne_bytes(number);
        if number < 0 {
            end();
            println!("skipped: a_helper_has_ended_although_another_holds_its_connection: no uffd");
            return;
        }
        let process = pidfd_open(Pid::from_raw(child).unwrap(), PidfdFlags::empty()).unwrap();
        let uffd = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).unwrap();
        let uffd = Uffd(uffd.into_raw_fd());

        // What it has in the pool at that address is not filled with zeros.
        assert!(!uffd.has_lost_memory());
        let mut word = [0u8; 8];
        let pagemap = File::open(format!("/proc/{child}/pagemap")).unwrap();
        pagemap.read_exact_at(&mut word, NOWHERE / PAGE_SIZE as u64 * 8).unwrap();
        assert_eq!(u64::from_le_bytes(word) >> 63, 0);

        let (ours, theirs) = UnixStream::pair().unwrap();
        let line = Line { socket: ours.as_raw_fd(), uffd };
        assert!(!line.ends_within(LOOK_AFTER * 2));
        let (asked, answers) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let gone = line.ask(Op::Barrier, &[], 1).is_err();
                asked.send(gone && line.barrier(None, || {}).is_err()).unwrap();
            });
            assert!(answers.recv_timeout(LOOK_AFTER * 2).is_err());
            end();
            assert!(answers.recv().unwrap() && line.ends_within(Duration::ZERO));
        });
        drop(theirs);
        // SAFETY: nobody else has it.
        drop(unsafe { File::from_raw_fd(uffd.0) });
    }
}
