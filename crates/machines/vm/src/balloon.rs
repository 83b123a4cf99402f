//! virtio-balloon: how a machine gives back that has all of its memory from the start, where the
//! guest or QEMU has no virtio-mem.
//!
//! QEMU asks the guest for a size of the whole machine (`balloon`), and the guest's driver takes
//! pages out of use until no more are left in it than that, or none are free. QEMU discards each;
//! free pages that the balloon does not hold are discarded as well (free-page reporting), until the
//! guest uses them again. How far it is, is polled (`query-balloon`).
//!
//! QEMU does not report the size that it has asked for. A caller that begins to follow a machine
//! therefore asks for the present size, and knows the requested size from then on.

use crate::memory_device::{MemoryDevice, ResizeError};
use crate::qmp::{Monitor, QmpError};
use serde_json::json;
use std::time::Duration;

/// A machine's balloon, as a device of the size that it leaves the guest beyond a minimum.
#[derive(Clone, Debug)]
pub struct Balloon {
    id: String,
    base_bytes: u64,
    block_bytes: u64,
    max_bytes: u64,
    /// None before anything is known of it.
    requested_bytes: Option<u64>,
}

impl Balloon {
    /// Describes the balloon of a machine with `base_bytes`, above zero, when the balloon is full,
    /// and `max_bytes` more when it is empty. Requests are multiples of `block_bytes`.
    pub fn new(id: String, base_bytes: u64, max_bytes: u64, block_bytes: u64) -> Balloon {
        Balloon { id, base_bytes, block_bytes, max_bytes, requested_bytes: None }
    }

    /// Returns the memory that the balloon leaves the guest now. Asks for the present size if no
    /// request is known.
    pub fn device(
        &mut self,
        monitor: &mut Monitor,
        patience: Duration,
    ) -> Result<MemoryDevice, QmpError> {
        let mut plugged_bytes = self.plugged(monitor, patience)?;
        let requested_bytes = match self.requested_bytes {
            Some(bytes) => bytes,
            None => {
                // No more than it has: more may be somebody else's.
                let bytes = plugged_bytes.min(self.max_bytes) / self.block_bytes * self.block_bytes;
                self.ask(monitor, bytes, patience)?;
                plugged_bytes = self.plugged(monitor, patience)?;
                bytes
            }
        };
        Ok(self.as_device(requested_bytes, plugged_bytes))
    }

    /// Asks the guest for a size. That it was asked does not say that it has it, or ever will.
    pub fn request_size(
        &mut self,
        monitor: &mut Monitor,
        bytes: u64,
        patience: Duration,
    ) -> Result<(), ResizeError> {
        // QEMU itself takes what is too much for the most, and says nothing.
        self.as_device(0, 0).check(bytes)?;
        Ok(self.ask(monitor, bytes, patience)?)
    }

    fn ask(
        &mut self,
        monitor: &mut Monitor,
        bytes: u64,
        patience: Duration,
    ) -> Result<(), QmpError> {
        monitor.execute("balloon", json!({ "value": self.base_bytes + bytes }), patience)?;
        self.requested_bytes = Some(bytes);
        Ok(())
    }

    fn plugged(&self, monitor: &mut Monitor, patience: Duration) -> Result<u64, QmpError> {
        let told = monitor.execute("query-balloon", json!({}), patience)?;
        let actual = told["actual"].as_u64();
        let actual = actual
            .ok_or_else(|| monitor.protocol(&format!("a balloon without its size: {told}")))?;
        Ok(actual.saturating_sub(self.base_bytes))
    }

    fn as_device(&self, requested_bytes: u64, plugged_bytes: u64) -> MemoryDevice {
        MemoryDevice {
            id: self.id.clone(),
            backend: String::new(),
            guest_node: 0,
            block_bytes: self.block_bytes,
            max_bytes: self.max_bytes,
            requested_bytes,
            plugged_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::fake::{GREETING, monitor, returns};
    use hecaton_testkit::patience;
    use std::sync::{Arc, Mutex};

    const M: u64 = 1 << 20;

    /// A guest with so many bytes, which does what it is asked with the next look but one.
    struct Guest {
        actual: u64,
        asked: Vec<u64>,
        is_late: bool,
    }

    fn guest(actual: u64) -> (Arc<Mutex<Guest>>, impl FnMut(&serde_json::Value) -> String) {
        let guest = Arc::new(Mutex::new(Guest { actual, asked: Vec::new(), is_late: false }));
        let shared = Arc::clone(&guest);
        let answer = move |request: &serde_json::Value| {
            let mut guest = shared.lock().unwrap();
            let value = match request["execute"].as_str() {
                Some("query-balloon") => {
                    let said = format!(r#"{{"actual": {}}}"#, guest.actual);
                    if !std::mem::replace(&mut guest.is_late, false) {
                        guest.actual = guest.asked.last().copied().unwrap_or(actual);
                    }
                    said
                }
                Some("balloon") => {
                    guest.asked.push(request["arguments"]["value"].as_u64().unwrap());
                    guest.is_late = true;
                    "{}".to_owned()
                }
                _ => "{}".to_owned(),
            };
            returns(request, &value)
        };
        (guest, answer)
    }

    #[test]
    fn the_machines_size_is_a_devices_beyond_the_minimum() {
        let (guest, answer) = guest(1024 * M);
        let (monitor, server) = monitor(GREETING, answer);
        let mut monitor = monitor.expect("connected");
        let mut balloon = Balloon::new("b".into(), 256 * M, 768 * M, 2 * M);
        let sizes = |monitor: &mut Monitor, balloon: &mut Balloon| {
            let device = balloon.device(monitor, patience()).expect("told");
            assert_eq!((device.id.as_str(), device.max_bytes), ("b", 768 * M));
            [device.requested_bytes / M, device.plugged_bytes / M]
        };
        assert_eq!(sizes(&mut monitor, &mut balloon), [768, 768], "it begins with all");
        balloon.request_size(&mut monitor, 100 * M, patience()).expect("asked");
        assert_eq!(sizes(&mut monitor, &mut balloon), [100, 768], "it was asked, and has not");
        assert_eq!(sizes(&mut monitor, &mut balloon), [100, 768]);
        assert_eq!(sizes(&mut monitor, &mut balloon), [100, 100]);
        for bytes in [3 * M, 770 * M] {
            balloon.request_size(&mut monitor, bytes, patience()).expect_err("cannot be");
        }
        drop(monitor);
        server.join().unwrap();
        assert_eq!(
            guest.lock().unwrap().asked,
            [1024 * M, 356 * M],
            "what cannot be is not asked for"
        );
    }

    #[test]
    fn who_does_not_know_what_was_asked_for_asks_for_what_there_is() {
        // On its way to some other size, and so between two blocks.
        let (guest, answer) = guest(357 * M);
        let (monitor, server) = monitor(GREETING, answer);
        let mut monitor = monitor.expect("connected");
        let mut balloon = Balloon::new("b".into(), 256 * M, 768 * M, 2 * M);
        let device = balloon.device(&mut monitor, patience()).expect("told");
        assert_eq!((device.requested_bytes, device.plugged_bytes), (100 * M, 101 * M));
        balloon.device(&mut monitor, patience()).expect("told");
        drop(monitor);
        server.join().unwrap();
        assert_eq!(guest.lock().unwrap().asked, [356 * M], "once");
    }

    #[test]
    fn a_balloon_without_a_size_is_not_a_full_one() {
        let (monitor, server) = monitor(GREETING, |request| returns(request, "{}"));
        let mut balloon = Balloon::new("b".into(), 2 * M, 2 * M, 2 * M);
        let error = balloon.device(&mut monitor.expect("connected"), patience());
        assert!(matches!(error, Err(QmpError::Protocol { .. })), "{error:?}");
        server.join().unwrap();
    }
}
