//! Reads the kernel's requests, and answers those that need not wait.

use crate::files::requests::{BUFFER_BYTES, Handler, Stop};
use crate::files::workers::{Job, Workers};
use crate::shared::Shared;
use hecaton_fuse::device::Device;
use hecaton_fuse::wire::{Reply, opcode};
use std::sync::Arc;

/// Runs until the file system is unmounted, or its device cannot be read.
pub(super) fn run(shared: &Arc<Shared>, device: &Device, workers: &Workers) {
    let mut handler = Handler { shared: Arc::clone(shared), fetcher: None };
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Some((request, len)) = device.next(&mut buffer) {
        let reply = match handler.answer(&request, &mut buffer, len) {
            Ok(reply) => reply,
            Err(Stop::Error(errno)) => Reply::Error(errno),
            Err(Stop::Wait) => {
                // Among requests that wait, only a write has data that `Request` does not hold.
                let kept = if request.opcode == opcode::WRITE { len } else { 0 };
                workers.take(Job { request, message: buffer[..kept].to_vec() });
                continue;
            }
        };
        device.answer(request.unique, &reply, &buffer);
    }
}
