//! Threads that answer the kernel.
//!
//! Each has a buffer of its own that holds the longest request, and takes the next request as it
//! has answered the one before. So as many are under way as there are threads, and the rest wait in
//! the kernel. With io_uring ([`super::uring`]) other threads have the requests; what the kernel
//! does not send there, these have.

use super::file::{File, MAX_IO_BYTES, init_reply};
use super::gate::Gate;
use super::uring::Queues;
use crate::attach::Role;
use crate::volume::Volume;
use hecaton_fuse::device::Device;
use hecaton_fuse::mapping::Mapping;
use hecaton_fuse::wire::{Reply, WRITE_DATA_AT, opcode};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;

/// Requests of a file that are under way at a time.
const THREADS: usize = 16;

/// The longest message.
const BUFFER_BYTES: usize = WRITE_DATA_AT + MAX_IO_BYTES;

/// Serves a volume on any number of mounts.
pub struct FileServer {
    volume: Arc<Volume>,
    gate: Arc<Gate>,
}

impl FileServer {
    /// A server of no mount yet.
    pub fn new(volume: Arc<Volume>) -> FileServer {
        FileServer { volume, gate: Arc::default() }
    }

    /// Serves a mount, given its descriptor, until it is unmounted: a new one, or one whose process
    /// was killed. The requests of one that is new may be wanted through io_uring; returns whether
    /// they come that way.
    pub fn serve(&self, device: OwnedFd, role: Role, over_uring: bool) -> io::Result<bool> {
        let file = Arc::new(File::new(Arc::clone(&self.volume), Arc::clone(&self.gate), role));
        let device = Arc::new(Mounted { device: Device::new(device, file.name()), file });
        let is_over_uring = over_uring && device.begin_over_uring();
        for _ in 0..THREADS {
            let device = Arc::clone(&device);
            // In advance: swap must not wait for a thread.
            let buffer = Mapping::resident(BUFFER_BYTES)?;
            thread::Builder::new().name("fuse".into()).spawn(move || device.work(buffer))?;
        }
        Ok(is_over_uring)
    }

    /// Answers what is under way, and with errors what comes after.
    pub fn stop(&self) {
        self.gate.close();
    }
}

/// A mount, and the file that it shows.
pub(super) struct Mounted {
    pub(super) device: Device,
    pub(super) file: Arc<File>,
}

impl Mounted {
    fn work(&self, mut buffer: Mapping) {
        while let Some((request, read)) = self.device.next(&mut buffer) {
            let reply = self.file.reply(&request, &mut buffer, WRITE_DATA_AT..read);
            self.device.answer(request.unique, &reply, &buffer);
        }
    }

    /// Answers the first message, which comes with a new mount, so that requests come through
    /// io_uring. Whether they do.
    fn begin_over_uring(self: &Arc<Self>) -> bool {
        let (mut buffer, volume) = (vec![0; BUFFER_BYTES], self.file.name());
        let first = loop {
            let Some((request, read)) = self.device.next(&mut buffer) else { return false };
            if request.opcode == opcode::INIT {
                break request;
            }
            let reply = self.file.reply(&request, &mut buffer, WRITE_DATA_AT..read);
            self.device.answer(request.unique, &reply, &buffer);
        };
        let queues = match first.offers_uring() {
            true => Queues::prepare(self),
            false => Err(io::Error::other("the kernel does not offer it")),
        };
        if let Err(error) = &queues {
            tracing::info!(volume, %error, "a file is served without io_uring");
        }
        let reply = init_reply(&first, &mut buffer, queues.is_ok());
        let is_refused = matches!(reply, Reply::Error(_));
        self.device.answer(first.unique, &reply, &buffer);
        match queues {
            Ok(queues) if !is_refused => {
                queues.begin(volume);
                true
            }
            _ => false,
        }
    }
}
