//! Reads the kernel's requests, and answers those that need not wait.

use crate::files::requests::{BUFFER_BYTES, Handler, Stop};
use crate::files::workers::{Job, Workers};
use crate::shared::Shared;
use hecaton_fuse::device::Device;
use hecaton_fuse::wire::opcode;
use std::sync::Arc;

/// Runs until the file system is gone, or its device cannot be read: then the memory is lost.
pub(super) fn run(shared: &Arc<Shared>, device: &Device, workers: &Workers) {
    let mut handler = Handler { shared: Arc::clone(shared), fetcher: None };
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Some((request, len)) = device.next(&mut buffer) {
        let outcome = match workers.must_queue(&request) {
            true => Err(Stop::Wait),
            false => handler.answer(&request, &mut buffer, len),
        };
        if matches!(outcome, Err(Stop::Wait)) {
            // Among requests that wait, only a write has data that `Request` does not hold.
            let kept = if request.opcode == opcode::WRITE { len } else { 0 };
            workers.take(Job { request, message: buffer[..kept].to_vec() });
        } else {
            workers.answer(&request, outcome, &buffer);
        }
    }
    let mut core = shared.lock();
    if !core.over {
        core.fail("the kernel has ended the file system of shared memory".into());
    }
}
