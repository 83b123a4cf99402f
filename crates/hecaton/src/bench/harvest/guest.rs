//! A harvest VM of the bench: a machine with a virtio-mem device, its monitor, and the port to the
//! manager inside.

use super::{BLOCK, Sizes, loads::Load, ways::Way};
use crate::bench::machine::kit::Kit;
use crate::bench::machine::{Machine, Memory, program_in_guest};
use crate::bench::world::interrupt;
use crate::bench::world::process::eventually;
use anyhow::{Context as _, ensure};
use hecaton_vm::{
    guest_port::{GuestMessage, HostMessage, Lines, Notice, PORT_NAME, line},
    memory_device::MemoryDevice,
    qmp::Monitor,
};
use serde_json::json;
use std::{
    ffi::OsString,
    io::{ErrorKind, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// The device's name.
const DEVICE: &str = "harvested";

/// How long a monitor may take to answer, and whoever else is there at once on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks at a size that changes.
pub(super) const TICK: Duration = Duration::from_millis(5);

/// How the manager in a guest is to be.
#[derive(Clone, Copy)]
pub(super) struct ManagerInside {
    /// Bytes that the application leaves to the rest of the guest.
    pub(super) reserve: u64,
    /// The most that is readied for the host.
    pub(super) ahead: u64,
    /// The command by which the application is told.
    pub(super) hook: &'static str,
    /// It listens to the host.
    pub(super) is_told: bool,
}

/// Starts it, and waits until it is there.
pub(super) fn start_manager(
    machine: &mut Machine<'_>,
    inside: ManagerInside,
) -> anyhow::Result<()> {
    let ahead = match inside.ahead {
        0 => String::new(),
        ahead => format!("pre-reclaim = \"{}M\"\n", ahead >> 20),
    };
    let port = if inside.is_told { "--port /dev/$(ls /sys/class/virtio-ports)" } else { "" };
    let script = format!(
        "cat >/tmp/hook <<'END'
{hook}
END
cat >/tmp/guest.toml <<'END'
reserve = \"{reserve}M\"
{ahead}[[application]]
name = \"application\"
hook = {{ command = [\"sh\", \"/tmp/hook\"], timeout-s = 300 }}
END
rm -f /tmp/manager.log
{program} guest --config /tmp/guest.toml {port} >/tmp/manager.log 2>&1 &
echo $! >/tmp/manager.pid
until [ -s /tmp/manager.log ]; do sleep 0.1; done",
        hook = inside.hook,
        reserve = inside.reserve >> 20,
        program = program_in_guest(),
    );
    machine.shell(&script).map(drop)
}

/// One that is up; it ends with this.
pub(super) struct Guest<'a> {
    machine: Machine<'a>,
    monitor: Monitor,
    port: UnixStream,
    heard: Lines,
    notices: u64,
    sizes: Sizes,
}

/// One that comes up.
pub(super) struct Starting<'a> {
    machine: Machine<'a>,
    monitor: PathBuf,
    port: PathBuf,
    sizes: Sizes,
}

impl<'a> Starting<'a> {
    pub(super) fn new(
        kit: &Kit,
        name: &str,
        kernel: &str,
        sizes: Sizes,
        dir: &Path,
    ) -> anyhow::Result<Self> {
        Self::with(kit, name, kernel, sizes, dir, &[])
    }

    /// With further arguments of its QEMU.
    pub(super) fn with(
        kit: &Kit,
        name: &str,
        kernel: &str,
        sizes: Sizes,
        dir: &Path,
        own: &[&str],
    ) -> anyhow::Result<Self> {
        let [monitor, port] = ["monitor", "port"].map(|what| dir.join(format!("{name}.{what}")));
        let server = |path: &Path| format!("{},server=on,wait=off", path.display());
        let all = sizes.base + sizes.device;
        let words = [
            format!("-m maxmem={}M", all.next_multiple_of(1 << 30) >> 20),
            format!("-object memory-backend-memfd,id=more,size={}M,share=on", sizes.device >> 20),
            format!(
                "-device virtio-mem-pci,id={DEVICE},memdev=more,block-size=2M,requested-size={}M",
                sizes.device >> 20
            ),
            format!("-qmp unix:{}", server(&monitor)),
            format!("-chardev socket,id=port,path={}", server(&port)),
            format!("-device virtio-serial -device virtserialport,chardev=port,name={PORT_NAME}"),
        ];
        let words = words.iter().flat_map(|words| words.split(' '));
        let qemu = words.chain(own.iter().copied()).map(OsString::from).collect();
        let kernel = format!("memhp_default_state=online_movable {kernel}");
        let memory = Memory::Told { qemu, kernel };
        let machine = Machine::start(kit, name, sizes.base, memory, dir)?;
        Ok(Self { machine, monitor, port, sizes })
    }

    /// Waits until it is up and has all its memory.
    pub(super) fn wait_up(mut self) -> anyhow::Result<Guest<'a>> {
        self.machine.wait_up()?;
        let monitor = eventually(PATIENCE, || Ok(Monitor::connect(&self.monitor, PATIENCE)?))?;
        let port = UnixStream::connect(&self.port).context("the port to the guest")?;
        port.set_nonblocking(true)?;
        let heard = Lines::default();
        let mut guest =
            Guest { machine: self.machine, monitor, port, heard, notices: 0, sizes: self.sizes };
        guest.grow()?;
        Ok(guest)
    }
}

impl Guest<'_> {
    pub(super) fn shell(&mut self, script: &str) -> anyhow::Result<String> {
        self.machine.shell(script)
    }

    /// Returns the last lines of QEMU and of the guest's kernel, for error messages.
    pub(super) fn last_words(&self) -> String {
        self.machine.last_words()
    }

    pub(super) fn device(&mut self) -> anyhow::Result<MemoryDevice> {
        let devices = self.monitor.memory_devices(PATIENCE)?;
        let device = devices.into_iter().find(|device| device.id == DEVICE);
        device.with_context(|| format!("QEMU lists no `{DEVICE}`"))
    }

    pub(super) fn request(&mut self, bytes: u64) -> anyhow::Result<()> {
        Ok(self.monitor.request_size(DEVICE, bytes, PATIENCE)?)
    }

    /// Asks once more for what it was asked for: its driver has perhaps given up for now.
    pub(super) fn remind(&mut self, bytes: u64) -> anyhow::Result<()> {
        self.request(bytes + BLOCK)?;
        self.request(bytes)
    }

    /// QEMU's process.
    pub(super) fn qemu(&self) -> u32 {
        self.machine.own_process()
    }

    /// Has its balloon leave so much of what it has from its start.
    pub(super) fn balloon(&mut self, bytes: u64, limit: Duration) -> anyhow::Result<()> {
        let begun = Instant::now();
        self.monitor.execute("balloon", json!({ "value": bytes }), PATIENCE)?;
        loop {
            let now = self.monitor.execute("query-balloon", json!({}), PATIENCE)?;
            if now["actual"] == bytes {
                return Ok(());
            }
            ensure!(begun.elapsed() < limit, "the balloon leaves {now} and not {bytes} bytes");
            interrupt::check()?;
            thread::sleep(TICK);
        }
    }

    /// Gives it all that it can have. How many bytes that were, and in how many seconds.
    pub(super) fn grow(&mut self) -> anyhow::Result<(u64, f64)> {
        let before = self.device()?.plugged_bytes;
        let begun = Instant::now();
        self.request(self.sizes.device)?;
        loop {
            let device = self.device()?;
            if device.plugged_bytes == self.sizes.device {
                return Ok((device.plugged_bytes - before, begun.elapsed().as_secs_f64()));
            }
            ensure!(begun.elapsed() < PATIENCE, "it does not grow: {device:?}");
            interrupt::check()?;
            thread::sleep(TICK);
        }
    }

    /// Starts the manager as `way` has it.
    pub(super) fn start_manager(&mut self, way: Way, load: Load) -> anyhow::Result<()> {
        let inside = ManagerInside {
            reserve: self.sizes.reserve,
            ahead: if way.readies() { self.sizes.device } else { 0 },
            hook: load.hook(),
            is_told: way.is_told(),
        };
        self.start_manager_as(inside)
    }

    pub(super) fn start_manager_as(&mut self, inside: ManagerInside) -> anyhow::Result<()> {
        start_manager(&mut self.machine, inside)?;
        if inside.is_told {
            let deadline = Instant::now() + PATIENCE;
            while self.hear()? != Some(GuestMessage::Hello) {
                ensure!(Instant::now() < deadline, "the manager in the guest does not greet");
                interrupt::check()?;
                thread::sleep(TICK);
            }
        }
        Ok(())
    }

    /// Ends the manager, which has all that it had readied used again.
    pub(super) fn end_manager(&mut self) -> anyhow::Result<()> {
        self.shell(
            "read -r pid </tmp/manager.pid && rm /tmp/manager.pid && kill $pid 2>/dev/null
while kill -0 $pid 2>/dev/null; do sleep 0.1; done",
        )?;
        // Drops the old manager's messages, which mean nothing to the next one.
        while self.hear()?.is_some() {}
        Ok(())
    }

    /// Tells the manager how much memory the device will have in the end. The number of that
    /// notice.
    pub(super) fn announce(&mut self, target: u64) -> anyhow::Result<u64> {
        self.notices += 1;
        let message = HostMessage::Target {
            id: self.notices,
            size_bytes: self.sizes.base + self.device()?.plugged_bytes,
            target_bytes: self.sizes.base + target,
        };
        self.say(&message)?;
        Ok(self.notices)
    }

    /// Bytes of the device in a machine of that size.
    pub(super) fn device_of(&self, size_bytes: u64) -> u64 {
        size_bytes.saturating_sub(self.sizes.base)
    }

    /// Nothing more will be taken.
    pub(super) fn cancel(&mut self) -> anyhow::Result<()> {
        self.say(&HostMessage::Cancelled { what: Notice::Target })
    }

    fn say(&mut self, message: &HostMessage) -> anyhow::Result<()> {
        self.port.write_all(line(message).as_bytes()).context("the port to the guest")
    }

    /// Returns the manager's next message, if one has arrived.
    pub(super) fn hear(&mut self) -> anyhow::Result<Option<GuestMessage>> {
        let mut bytes = [0; 4096];
        match self.port.read(&mut bytes) {
            Ok(count) => self.heard.take(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("the port to the guest"),
        }
        let message = self.heard.next_message().transpose();
        message.map_err(|error| anyhow::anyhow!("the manager in the guest says {error}"))
    }
}
