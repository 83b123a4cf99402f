//! A device's queue: what the kernel asks for, and its answers.
//!
//! The driver takes both from one thread alone, and so that one does nothing else: it would hold up
//! all others while a donor is waited for. It hands requests to threads that do them, and is woken
//! when there are answers. Each tag of the queue has a buffer, into which the kernel copies what is
//! written before it asks, and from which it copies what was read as it is answered; in between it
//! is the request's.

use super::abi::{self, Descriptor, IoCommand, io};
use super::control::{DEPTH, MAX_IO_BYTES};
use super::request::Request;
use crate::attach::Role;
use crate::volume::Volume;
use hecaton_memory::PAGE_SIZE;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::io as std_io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Threads that do requests.
const THREADS: usize = 16;

/// Marks what wakes the queue's thread, which is no tag.
const WAKE: u64 = u64::MAX;

/// Bytes of the table in which the kernel shows requests.
const TABLE_BYTES: usize = (DEPTH as usize * size_of::<Descriptor>()).next_multiple_of(PAGE_SIZE);

/// A queue that is served as soon as [`Queue::serve`] is called.
pub(super) struct Queue {
    ring: IoUring,
    device: OwnedFd,
    table: Table,
    shared: Shared,
}

/// State that the queue's thread shares with the threads that do requests.
struct Shared {
    volume: Arc<Volume>,
    role: Role,
    buffers: Vec<Mutex<Box<[u8]>>>,
    asked: Mutex<Asked>,
    more: Condvar,
    /// Tags, and what is answered.
    done: Mutex<Vec<(u16, i32)>>,
    /// Readable when there is something in `done`.
    wake: OwnedFd,
}

#[derive(Default)]
struct Asked {
    requests: VecDeque<Request>,
    is_over: bool,
}

impl Queue {
    /// Opens the queue of an open device, which no other process serves.
    pub(super) fn open(device: OwnedFd, volume: Arc<Volume>, role: Role) -> std_io::Result<Queue> {
        let table = Table::map(&device)?;
        let depth = usize::from(DEPTH);
        let buffer = |_| Mutex::new(vec![0; MAX_IO_BYTES].into_boxed_slice());
        let shared = Shared {
            volume,
            role,
            buffers: (0..depth).map(buffer).collect(),
            asked: Mutex::new(Asked { requests: VecDeque::with_capacity(depth), is_over: false }),
            more: Condvar::new(),
            done: Mutex::new(Vec::with_capacity(depth)),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        // Each tag has one command under way, and one waits to be woken.
        let ring = IoUring::new(u32::from(DEPTH) * 2)?;
        Ok(Queue { ring, device, table, shared })
    }

    /// Serves until the device is stopped. To be called by the thread that has nothing else to do.
    pub(super) fn serve(mut self) -> std_io::Result<()> {
        let result = std::thread::scope(|scope| {
            let shared = &self.shared;
            for _ in 0..THREADS {
                let thread = std::thread::Builder::new().name("ublk".into());
                if let Err(error) = thread.spawn_scoped(scope, || shared.work()) {
                    shared.end();
                    return Err(error);
                }
            }
            let result = answer(&mut self.ring, &self.device, &self.table, shared);
            shared.end();
            result
        });
        // Before the buffers: the kernel may write to those until then.
        drop(self.ring);
        drop(self.device);
        result
    }
}

/// Asks the kernel for requests, and answers them, until it has none for any tag any more.
fn answer(
    ring: &mut IoUring,
    device: &OwnedFd,
    table: &Table,
    shared: &Shared,
) -> std_io::Result<()> {
    let depth = usize::from(DEPTH);
    let device = types::Fd(device.as_raw_fd());
    let command = |command, tag: u16, result| {
        let address = shared.buffer(tag).as_mut_ptr().expose_provenance() as u64;
        let said = IoCommand { tag, result, address };
        opcode::UringCmd16::new(device, command).cmd(said.bytes()).build().user_data(tag.into())
    };
    let wake = || {
        let fd = types::Fd(shared.wake.as_raw_fd());
        opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WAKE)
    };
    for tag in 0..DEPTH {
        push(ring, &command(io::FETCH, tag, 0));
    }
    push(ring, &wake());
    let (mut over, mut came) = (0, Vec::with_capacity(depth + 1));
    while over < depth {
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.kind() == std_io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        came.extend(ring.completion().map(|answer| (answer.user_data(), answer.result())));
        for (of, result) in came.drain(..) {
            if of == WAKE {
                let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
                push(ring, &wake());
                continue;
            }
            let tag = u16::try_from(of).expect("the tag of a command");
            match result {
                0 => shared.ask(Request::decode(tag, table.descriptor(tag))),
                // The device is stopped, or is going to have another process.
                _ => over += 1,
            }
        }
        for (tag, result) in shared.done().drain(..) {
            push(ring, &command(io::COMMIT_AND_FETCH, tag, result));
        }
    }
    Ok(())
}

fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    // SAFETY: descriptors and buffers that commands name are there until the ring is gone
    // (`Queue::serve`). A buffer is locked by the one who does its request, which is under way only
    // between two commands of its tag.
    unsafe { ring.submission().push(entry) }
        .expect("each tag has one place, and there is one more");
}

impl Shared {
    fn work(&self) {
        loop {
            let asked = self.asked();
            let is_idle = |asked: &mut Asked| asked.requests.is_empty() && !asked.is_over;
            let asked = self.more.wait_while(asked, is_idle);
            let request = asked.expect("no thread panics with the requests").requests.pop_front();
            let Some(request) = request else { return };
            let answer = request.serve(&self.volume, self.role, &mut self.buffer(request.tag));
            self.done().push((request.tag, answer));
            // A counter that is full has been seen as little as one that is not.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    fn ask(&self, request: Request) {
        self.asked().requests.push_back(request);
        self.more.notify_one();
    }

    /// Ends the threads once they have done all requests in `asked`.
    fn end(&self) {
        self.asked().is_over = true;
        self.more.notify_all();
    }

    fn buffer(&self, tag: u16) -> MutexGuard<'_, Box<[u8]>> {
        self.buffers[usize::from(tag)].lock().expect("no thread panics with a buffer")
    }

    fn asked(&self) -> MutexGuard<'_, Asked> {
        self.asked.lock().expect("no thread panics with the requests")
    }

    fn done(&self) -> MutexGuard<'_, Vec<(u16, i32)>> {
        self.done.lock().expect("no thread panics with the answers")
    }
}

/// Where the kernel shows a queue's requests.
struct Table(*mut c_void);

// SAFETY: it is read only, and the same from every thread.
unsafe impl Send for Table {}

impl Table {
    fn map(device: &OwnedFd) -> std_io::Result<Table> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping, wherever the kernel likes.
        let at = unsafe { mmap(ptr::null_mut(), TABLE_BYTES, ProtFlags::READ, flags, device, 0) }?;
        Ok(Table(at))
    }

    /// The request of a tag that the kernel has just asked for.
    fn descriptor(&self, tag: u16) -> Descriptor {
        assert!(tag < DEPTH);
        // SAFETY: within the mapping, which has as many; the kernel does not write to this one
        // until it is answered.
        unsafe { self.0.cast::<abi::Descriptor>().add(tag.into()).read_volatile() }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: of the whole mapping, of which there are no references.
        let _ = unsafe { munmap(self.0, TABLE_BYTES) };
    }
}
