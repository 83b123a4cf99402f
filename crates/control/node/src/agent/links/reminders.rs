//! Guests that have stopped short of what they were asked for, and are asked once more. No I/O and
//! no clock.
//!
//! virtio-mem's driver that found nothing more to give tries again after 50 s, and then less and
//! less often, up to five minutes. It does so at once when it is asked for another size: so it is
//! asked for a block more than it was, and then for the same again.

use hecaton_vm::memory_device::MemoryDevice;
use std::collections::BTreeMap;

/// By device: the requested size, and the size that is one block larger. An entry stays until both
/// requests have succeeded.
#[derive(Debug, Default)]
pub(crate) struct Reminders(BTreeMap<String, [u64; 2]>);

impl Reminders {
    /// Takes those devices that are larger than they were asked to be.
    pub(crate) fn note(&mut self, devices: &[MemoryDevice]) {
        for device in devices {
            let (asked, block) = (device.requested_bytes, device.block_bytes);
            if device.plugged_bytes > asked {
                self.0.entry(device.id.clone()).or_insert([asked, asked + block]);
            }
        }
    }

    /// A device is asked for another size anyway.
    pub(crate) fn forget(&mut self, device: &str) {
        self.0.remove(device);
    }

    /// Has all of them asked.
    pub(crate) fn say<E>(
        &mut self,
        mut ask: impl FnMut(&str, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        while let Some(entry) = self.0.first_entry() {
            let [asked, more] = *entry.get();
            ask(entry.key(), more)?;
            ask(entry.key(), asked)?;
            entry.remove();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: &str, requested_bytes: u64, plugged_bytes: u64) -> MemoryDevice {
        MemoryDevice {
            id: id.into(),
            backend: String::new(),
            guest_node: 0,
            block_bytes: 2,
            max_bytes: 16,
            requested_bytes,
            plugged_bytes,
        }
    }

    /// The requests of `say`: device and size.
    fn said(reminders: &mut Reminders) -> Vec<(String, u64)> {
        let mut asked = Vec::new();
        let said: Result<(), ()> = reminders.say(|id, bytes| {
            asked.push((id.to_owned(), bytes));
            Ok(())
        });
        said.expect("nobody refuses");
        asked
    }

    #[test]
    fn those_that_stopped_short_are_asked_for_more_and_then_for_the_same() {
        let mut reminders = Reminders::default();
        reminders.note(&[device("a", 4, 8), device("b", 8, 4), device("c", 4, 4)]);
        assert_eq!(said(&mut reminders), [("a".to_owned(), 6), ("a".to_owned(), 4)]);
        assert_eq!(said(&mut reminders), [], "once");
    }

    #[test]
    fn a_size_that_was_not_put_back_is_by_the_next_try_unless_there_is_another() {
        let mut reminders = Reminders::default();
        reminders.note(&[device("a", 4, 8), device("b", 4, 8)]);
        let fails = |_: &str, bytes| if bytes == 6 { Ok(()) } else { Err("silent") };
        assert_eq!(reminders.say(fails), Err("silent"));
        // As the first was left.
        reminders.note(&[device("a", 6, 8)]);
        reminders.forget("b");
        assert_eq!(said(&mut reminders), [("a".to_owned(), 6), ("a".to_owned(), 4)]);
    }
}
