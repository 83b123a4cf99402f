//! virtio-mem: the devices by which a machine grows and shrinks.
//!
//! QEMU asks the guest for a size (`requested-size`), and the guest plugs and unplugs blocks until
//! it has it. The guest stops early when it has nothing left to unplug. Its progress is polled
//! (`query-memory-devices`): QEMU sends events too (`MEMORY_DEVICE_SIZE_CHANGE`), but at most one a
//! second, and the last one late. QEMU discards unplugged memory: the host has it back, zeroed, at
//! the latest at the next access.
//!
//! Guests need `memhp_default_state=online_movable` (or `auto_online_blocks`) so that what is
//! plugged holds nothing that cannot be moved; elsewhere a single page of the kernel's own keeps a
//! whole block.

use crate::qmp::{Monitor, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::Duration;

/// A virtio-mem device of a running machine, or what its [balloon](crate::balloon) leaves of its
/// memory. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryDevice {
    /// Its id in QEMU.
    pub id: String,
    /// The id of the memory backend behind it.
    pub backend: String,
    /// The machine's own NUMA node that it belongs to.
    pub guest_node: u32,
    /// All sizes are multiples of this.
    pub block_bytes: u64,
    /// The largest size.
    pub max_bytes: u64,
    /// Size that the guest was asked for.
    pub requested_bytes: u64,
    /// Size that the guest has.
    pub plugged_bytes: u64,
}

/// Why a machine was not asked for a size.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// No such device.
    #[error("the machine has no virtio-mem device `{id}`, but {there}; see `query-memory-devices`")]
    NoSuchDevice {
        /// The requested id.
        id: String,
        /// Which there are.
        there: String,
    },
    /// Not a multiple.
    #[error(
        "{bytes} bytes cannot be the size of `{id}`: it has blocks of {block_bytes}; \
         ask for {below} or {above}"
    )]
    NoBlocks {
        /// The device.
        id: String,
        /// The requested size.
        bytes: u64,
        /// The device's block.
        block_bytes: u64,
        /// The nearest size below.
        below: u64,
        /// The nearest size above.
        above: u64,
    },
    /// More than it can have.
    #[error(
        "{bytes} bytes cannot be the size of `{id}`: its backend has {max_bytes}, and no more is to be had \
         while the machine runs"
    )]
    TooLarge {
        /// The device.
        id: String,
        /// The requested size.
        bytes: u64,
        /// The largest.
        max_bytes: u64,
    },
    /// The monitor.
    #[error(transparent)]
    Monitor(#[from] QmpError),
}

/// The path of an object of the user's, in QEMU.
const OBJECTS: &str = "/objects/";

impl Monitor {
    /// The machine's virtio-mem devices, as they are now. Those without an id, which nobody can ask
    /// for anything, and memory devices of other kinds are passed over.
    pub fn memory_devices(&mut self, patience: Duration) -> Result<Vec<MemoryDevice>, QmpError> {
        let listed = self.execute("query-memory-devices", json!({}), patience)?;
        let mut devices = Vec::new();
        for device in listed.as_array().into_iter().flatten() {
            if device["type"] != "virtio-mem" || device["data"]["id"].as_str().is_none() {
                continue;
            }
            let device = read(&device["data"]).ok_or_else(|| {
                self.protocol(&format!("a virtio-mem device without its sizes: {device}"))
            })?;
            devices.push(device);
        }
        Ok(devices)
    }

    /// Asks the guest for a size. That it was asked does not say that it has it, or ever will.
    pub fn request_size(
        &mut self,
        id: &str,
        bytes: u64,
        patience: Duration,
    ) -> Result<(), ResizeError> {
        let devices = self.memory_devices(patience)?;
        let Some(device) = devices.iter().find(|device| device.id == id) else {
            let ids: Vec<String> = devices.iter().map(|d| format!("`{}`", d.id)).collect();
            let there = if ids.is_empty() { "none at all".to_owned() } else { ids.join(", ") };
            return Err(ResizeError::NoSuchDevice { id: id.to_owned(), there });
        };
        device.check(bytes)?;
        let wish = json!({
            "path": format!("/machine/peripheral/{id}"),
            "property": "requested-size",
            "value": bytes,
        });
        self.execute("qom-set", wish, patience)?;
        Ok(())
    }
}

impl MemoryDevice {
    /// Whether a size is possible. QEMU refuses the others too, with fewer words.
    pub fn check(&self, bytes: u64) -> Result<(), ResizeError> {
        let (id, block_bytes, max_bytes) = (self.id.clone(), self.block_bytes, self.max_bytes);
        if bytes > max_bytes {
            return Err(ResizeError::TooLarge { id, bytes, max_bytes });
        }
        if !bytes.is_multiple_of(block_bytes) {
            let below = bytes / block_bytes * block_bytes;
            let above = (below + block_bytes).min(max_bytes);
            return Err(ResizeError::NoBlocks { id, bytes, block_bytes, below, above });
        }
        Ok(())
    }
}

fn read(data: &Value) -> Option<MemoryDevice> {
    let size = |name: &str| data[name].as_u64();
    let backend = data["memdev"].as_str()?;
    Some(MemoryDevice {
        id: data["id"].as_str()?.to_owned(),
        backend: backend.strip_prefix(OBJECTS).unwrap_or(backend).to_owned(),
        guest_node: u32::try_from(size("node")?).ok()?,
        block_bytes: size("block-size").filter(|bytes| *bytes > 0)?,
        max_bytes: size("max-size")?,
        requested_bytes: size("requested-size")?,
        plugged_bytes: size("size")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::fake::{GREETING, monitor, returns};
    use hecaton_testkit::patience;
    use std::sync::{Arc, Mutex};

    /// As QEMU 10.0 answers.
    const DEVICES: &str = r#"[{"type": "dimm", "data": {"id": "d", "addr": 1, "size": 2, "slot": 0, "node": 0,
        "memdev": "/objects/other", "hotplugged": true, "hotpluggable": true}},
        {"type": "virtio-mem", "data": {"memaddr": 4294967296, "requested-size": 4194304,
        "size": 2097152, "max-size": 536870912, "block-size": 2097152, "node": 1,
        "memdev": "/objects/more", "id": "vm0"}},
        {"type": "virtio-mem", "data": {"memaddr": 8589934592, "requested-size": 0, "size": 0,
        "max-size": 536870912, "block-size": 2097152, "node": 0, "memdev": "/objects/anon"}}]"#;

    #[test]
    fn devices_are_read_and_asked_for_sizes_that_can_be() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&asked);
        let (monitor, server) = monitor(GREETING, move |request| {
            let value = match request["execute"].as_str() {
                Some("query-memory-devices") => DEVICES.replace('\n', " "),
                Some("qom-set") => {
                    sink.lock().unwrap().push(request["arguments"].clone());
                    "{}".to_owned()
                }
                _ => "{}".to_owned(),
            };
            returns(request, &value)
        });
        let mut monitor = monitor.expect("connected");
        let devices = monitor.memory_devices(patience()).expect("told");
        let device = MemoryDevice {
            id: "vm0".into(),
            backend: "more".into(),
            guest_node: 1,
            block_bytes: 2 << 20,
            max_bytes: 512 << 20,
            requested_bytes: 4 << 20,
            plugged_bytes: 2 << 20,
        };
        assert_eq!(devices, [device]);
        let mut ask = |id: &str, bytes| {
            monitor.request_size(id, bytes, patience()).map_err(|error| error.to_string())
        };
        assert_eq!(ask("vm0", 6 << 20), Ok(()));
        for (id, bytes, words) in [
            ("vm0", (6 << 20) + 4096, "ask for 6291456 or 8388608"),
            ("vm0", 514 << 20, "its backend has 536870912"),
            ("vm1", 0, "no virtio-mem device `vm1`, but `vm0`"),
        ] {
            let error = ask(id, bytes).expect_err(words);
            assert!(error.contains(words), "{error}");
        }
        drop(monitor);
        server.join().unwrap();
        let wish = json!({
            "path": "/machine/peripheral/vm0", "property": "requested-size", "value": 6 << 20
        });
        assert_eq!(*asked.lock().unwrap(), [wish], "what cannot be is not asked for");
    }

    #[test]
    fn a_machine_without_such_devices_says_so() {
        let (monitor, server) = monitor(GREETING, |request| {
            let is_list = request["execute"] == "query-memory-devices";
            returns(request, if is_list { "[]" } else { "{}" })
        });
        let mut monitor = monitor.expect("connected");
        assert_eq!(monitor.memory_devices(patience()).expect("told"), []);
        let error = monitor.request_size("vm0", 0, patience()).expect_err("nobody to ask");
        assert!(error.to_string().contains("but none at all"), "{error}");
        drop(monitor);
        server.join().unwrap();
    }

    #[test]
    fn a_device_without_sizes_is_no_device_of_size_zero() {
        let (monitor, server) = monitor(GREETING, |request| {
            let is_list = request["execute"] == "query-memory-devices";
            let device =
                r#"[{"type": "virtio-mem", "data": {"id": "vm0", "memdev": "/objects/m"}}]"#;
            returns(request, if is_list { device } else { "{}" })
        });
        let error = monitor.expect("connected").memory_devices(patience()).expect_err("nonsense");
        assert!(matches!(error, QmpError::Protocol { .. }), "{error}");
        server.join().unwrap();
    }
}
