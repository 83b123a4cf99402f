//! Reads the kernel's requests, and answers at once what needs nobody else. The rest goes to the
//! back room.

use crate::files::backroom::{Backroom, Job};
use crate::files::requests::{BUFFER_BYTES, Clerk, Stop};
use crate::shared::Shared;
use hecaton_fuse::device::Device;
use hecaton_fuse::wire::{Reply, opcode};
use std::sync::Arc;

/// Runs until the file system is unmounted.
pub(super) fn run(shared: &Arc<Shared>, device: &Device, backroom: &Backroom) {
    let mut clerk = Clerk { shared: Arc::clone(shared), fetcher: None };
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Some((request, len)) = device.next(&mut buffer) {
        let reply = match clerk.answer(&request, &mut buffer, len) {
            Ok(reply) => reply,
            Err(Stop::Error(errno)) => Reply::Error(errno),
            Err(Stop::Wait) => {
                // Only a write has more to say than its request.
                let kept = if request.opcode == opcode::WRITE { len } else { 0 };
                backroom.take(Job { request, message: buffer[..kept].to_vec() });
                continue;
            }
        };
        device.answer(request.unique, &reply, &buffer);
    }
}
