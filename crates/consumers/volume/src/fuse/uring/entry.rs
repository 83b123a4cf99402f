//! One entry of a queue, which the thread has that answers what comes there.

use super::abi::{Command, Headers, Place, Places};
use crate::fuse::file::MAX_IO_BYTES;
use crate::fuse::server::Mounted;
use hecaton_fuse::mapping::Mapping;
use hecaton_fuse::wire::{IN_HEADER_BYTES, OUT_HEADER_BYTES, Reply, Request, answer_header};
use io_uring::{IoUring, squeue, types};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};

/// Bytes before the data of a request.
const HEAD_BYTES: usize = 4096;
/// Where the places stand.
const PLACES_AT: usize = 512;
const MEMORY_BYTES: usize = HEAD_BYTES + MAX_IO_BYTES;

const _: () = assert!(size_of::<Headers>() <= PLACES_AT);

/// An entry of a queue.
pub(super) struct Entry<'a> {
    /// Before the memory, to which the kernel may write until it is gone.
    ring: IoUring<squeue::Entry128>,
    memory: Memory,
    mounted: &'a Mounted,
    queue: u16,
    /// Result of a completed command that `wait` has not returned yet.
    came: Option<i32>,
}

impl Entry<'_> {
    /// To be made by the thread that is going to serve it.
    pub(super) fn new(mounted: &Mounted, queue: u16) -> io::Result<Entry<'_>> {
        // The kernel writes requests to the memory when this thread waits for them, and at no other
        // time.
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(1)?;
        Ok(Entry { ring, memory: Memory::new()?, mounted, queue, came: None })
    }

    /// Gives it to the kernel.
    pub(super) fn register(&mut self) -> io::Result<()> {
        let places = self.memory.places();
        let command = Command { queue: self.queue, commit_id: 0 };
        self.push(&command.register(self.fd(), places));
        self.ring.submit()?;
        self.came = self.ring.completion().next().map(|came| came.result());
        match self.came {
            Some(error) if error < 0 => Err(io::Error::from_raw_os_error(-error)),
            _ => Ok(()),
        }
    }

    /// Answers requests until the file is unmounted.
    pub(super) fn serve(&mut self) -> io::Result<()> {
        while let Some(request) = self.next()? {
            self.answer(&request);
        }
        Ok(())
    }

    /// Waits for a request; none if the file is unmounted.
    pub(super) fn next(&mut self) -> io::Result<Option<Request>> {
        match -self.wait()? {
            0 => {}
            libc::ENOTCONN | libc::ECONNABORTED => return Ok(None),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
        let (headers, _) = self.memory.parts();
        let header = &headers.header[..IN_HEADER_BYTES];
        Ok(Some(Request::of_parts(header, &headers.arguments)))
    }

    /// Does what a request wants, and says so with the next command.
    pub(super) fn answer(&mut self, request: &Request) {
        let (headers, payload) = self.memory.parts();
        let bytes = headers.payload_bytes as usize;
        let (errno, bytes) = match self.mounted.file.reply(request, payload, 0..bytes) {
            Reply::Bytes(bytes) => (0, bytes),
            Reply::Error(errno) => (errno.raw_os_error(), 0),
            // Such come by the device alone.
            Reply::Nothing => (Errno::NOSYS.raw_os_error(), 0),
        };
        let answer = answer_header(request.unique, errno, bytes);
        headers.header[..OUT_HEADER_BYTES].copy_from_slice(&answer);
        headers.payload_bytes = bytes as u32;
        let command = Command { queue: self.queue, commit_id: headers.commit_id };
        self.push(&command.commit(self.fd()));
    }

    /// Waits for the command that is under way, and returns what it ends with.
    fn wait(&mut self) -> io::Result<i32> {
        loop {
            if let Some(came) = self.came.take() {
                return Ok(came);
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            self.came = self.ring.completion().next().map(|came| came.result());
        }
    }

    fn fd(&self) -> types::Fd {
        types::Fd(self.mounted.device.as_fd().as_raw_fd())
    }

    fn push(&mut self, command: &squeue::Entry128) {
        // SAFETY: the device is open, and the memory there, until the ring is gone. Nobody has a
        // reference to the memory while a command is under way, since that takes one to the entry.
        unsafe { self.ring.submission().push(command) }.expect("one command at a time");
    }
}

/// Memory that the entry shares with the kernel: headers, places, and then the data.
struct Memory(Mapping);

impl Memory {
    fn new() -> io::Result<Memory> {
        Ok(Memory(Mapping::new(MEMORY_BYTES)?))
    }

    /// Says where the parts are, and where that is said.
    fn places(&mut self) -> *const Places {
        let head = self.0.start().expose_provenance() as u64;
        let headers = Place { address: head, bytes: size_of::<Headers>() as u64 };
        let payload = Place { address: head + HEAD_BYTES as u64, bytes: MAX_IO_BYTES as u64 };
        // SAFETY: it is within the mapping, behind the headers, and aligned.
        unsafe {
            let places = self.0.start().add(PLACES_AT).cast::<Places>();
            places.write([headers, payload]);
            places
        }
    }

    /// The headers and the data.
    fn parts(&mut self) -> (&mut Headers, &mut [u8]) {
        // SAFETY: both are within the mapping, apart from each other, of plain integers, and
        // borrowed with it.
        unsafe {
            let start = self.0.start();
            let payload = start.add(HEAD_BYTES);
            (&mut *start.cast(), std::slice::from_raw_parts_mut(payload, MAX_IO_BYTES))
        }
    }
}
