//! Runs virtual machines with a Debian kernel and a small initramfs (`scripts/guest.sh`).
//! Their init runs a script and prints on the serial console.

pub(crate) mod archive;

use super::{
    cluster::{Cluster, PATIENCE},
    process::{Running, kill_dead, missing, run},
    wait::{until, until_every},
    world,
};
use anyhow::{Context as _, bail, ensure};
use hecaton_testkit::scaled;
use hecaton_vm::qmp::Monitor;
use serde_json::Value;
use std::{
    env,
    ffi::OsString,
    fmt::Write as _,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

/// How long a guest may take for anything: emulated, on a busy machine, with its memory elsewhere.
pub(crate) const GUEST_PATIENCE: Duration = Duration::from_secs(400);

/// QEMU 7.2 emulates this processor feature wrongly: CMPXCHG16B spoils the flags. A kernel that
/// uses the feature crashes now and then, with plain memory too.
const BROKEN: &str = "cx16";

/// Parts of console lines that show why a guest has failed.
const TELLING: [&str; 6] =
    ["Out of memory:", "Kernel panic", "BUG:", "detected stall", "blocked for more", "guest: exit"];

/// The directory of the guest's files, for processes of a world.
const GUESTS: &str = "HECATON_E2E_GUESTS";

/// Files that guests start from: kernels, initramfs, and QEMU of the backports.
#[derive(Clone, Debug)]
pub(crate) struct Guests {
    dir: PathBuf,
}

/// Which QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Qemu {
    /// Debian's own.
    Installed,
    /// From the backports, unpacked beside the guest.
    Backports,
}

impl Guests {
    /// Builds the guest, and QEMU and libvirt of the backports, unless they are built. Returns the
    /// reason to skip if the build fails. Packages come from the network, which no world has.
    pub(crate) fn build() -> anyhow::Result<Result<Self, String>> {
        if let Some(reason) = missing("qemu-system-x86_64") {
            return Ok(Err(reason));
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scripts/guest.sh");
        let test = env::current_exe()?;
        let target = test.ancestors().nth(3).context("the test is in no target directory")?;
        let built = Command::new(script)
            .arg("libvirt")
            .env("CARGO_TARGET_DIR", target)
            .stdin(Stdio::null())
            .output()?;
        if !built.status.success() {
            return Ok(Err(String::from_utf8_lossy(&built.stderr).trim().replace('\n', "; ")));
        }
        let dir = String::from_utf8(built.stdout)?.trim().into();
        Ok(Ok(Self { dir }))
    }

    /// Tells a process of a world where they are.
    pub(crate) fn name_to(&self, command: &mut Command) {
        command.env(GUESTS, &self.dir);
    }

    /// Those that this process was told of.
    pub(crate) fn of_world() -> anyhow::Result<Self> {
        let dir = env::var_os(GUESTS).context("nobody has built the guest")?;
        Ok(Self { dir: dir.into() })
    }

    /// The same guest, made in `dir`, with `program` in its `/bin` and these files.
    pub(crate) fn with(
        &self,
        dir: PathBuf,
        program: &Path,
        files: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let root = dir.join("root");
        for (path, content) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().context("a path in the guest")?)?;
            std::fs::write(&path, content)?;
        }
        for same in ["vmlinux", "vmlinuz", "qemu-10"] {
            std::os::unix::fs::symlink(self.dir.join(same), dir.join(same))?;
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scripts/guest-with.sh");
        let mut command = Command::new(script);
        command.arg(self.dir.join("initramfs")).arg(program).arg(root).arg(dir.join("initramfs"));
        run(&mut command, PATIENCE)?.expect_success("an archive for the guest")?;
        Ok(Self { dir })
    }

    /// The directory of the backports' virsh.
    pub(crate) fn backports_virsh(&self) -> PathBuf {
        self.dir.join("libvirt-11/bin")
    }

    /// The kernel as Debian packs it, which firmware starts and which unpacks itself.
    pub(crate) fn packed_kernel(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// QEMU and the arguments that every guest has.
    pub(crate) fn command_line(&self, qemu: Qemu, script: &str) -> Vec<OsString> {
        let unpacked = self.dir.join("qemu-10/usr");
        let program: PathBuf = match qemu {
            Qemu::Installed => "qemu-system-x86_64".into(),
            Qemu::Backports => unpacked.join("bin/qemu-system-x86_64"),
        };
        let mut words: Vec<OsString> = vec![program.into()];
        if qemu == Qemu::Backports {
            for firmware in ["share/qemu", "share/seabios"] {
                words.extend(["-L".into(), unpacked.join(firmware).into()]);
            }
        }
        // With two emulated processors a guest has stood still now and then, for a reason that is
        // not known (docs/vms.md). Tests in which two are to be in memory at once add `-smp 2`.
        let fixed = "-accel tcg -M q35 -nodefaults -display none -serial stdio -smp 1";
        words.extend(fixed.split(' ').map(OsString::from));
        if qemu == Qemu::Installed {
            words.extend(["-cpu".into(), format!("qemu64,-{BROKEN}").into()]);
        }
        words.extend(["-kernel".into(), self.dir.join("vmlinux").into()]);
        words.extend(["-initrd".into(), self.dir.join("initramfs").into()]);
        words.extend(["-append".into(), Self::kernel_line(script).into()]);
        words
    }

    /// A libvirt domain with this guest, whose console is a file.
    pub(crate) fn domain(&self, name: &str, mib: u64, console: &Path, script: &str) -> String {
        format!(
            "<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>{mib}</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{}</kernel>
    <initrd>{}</initrd>
    <cmdline>{}</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='custom' match='exact'>
    <model>qemu64</model>
    <feature policy='disable' name='{BROKEN}'/>
  </cpu>
  <on_poweroff>destroy</on_poweroff>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <serial type='file'><source path='{}'/></serial>
    <memballoon model='virtio'/>
  </devices>
</domain>
",
            self.dir.join("vmlinux").display(),
            self.dir.join("initramfs").display(),
            Self::kernel_line(script),
            console.display()
        )
    }

    /// The kernel's command line. Its check of the timer fails now and then where a processor is
    /// emulated on a busy host. Self-tests of ciphers and guards against other guests on the same
    /// processor take an emulated one a second or two. A fault of the kernel ends the guest.
    fn kernel_line(script: &str) -> String {
        let script = base64(script.as_bytes());
        format!(
            "console=ttyS0 quiet no_timer_check panic=-1 oops=panic mitigations=off cryptomgr.notests \
             initcall_blacklist=jent_mod_init,crypto_kdf108_init hecaton.script={script}"
        )
    }
}

/// A machine that runs.
pub(crate) struct Machine {
    pub(crate) name: String,
    running: Running,
    lines: Receiver<String>,
    said: Vec<String>,
    monitor: PathBuf,
}

/// How a machine is started.
pub(crate) struct Spec<'a> {
    pub(crate) name: &'a str,
    pub(crate) memory: &'a str,
    pub(crate) local: &'a str,
    /// Further arguments of `hecaton vm run`.
    pub(crate) options: &'a [&'a str],
    pub(crate) qemu: Qemu,
    /// Further arguments of QEMU.
    pub(crate) arguments: &'a [&'a str],
    pub(crate) script: &'a str,
}

impl Default for Spec<'_> {
    fn default() -> Self {
        Spec {
            name: "guest",
            memory: "512M",
            local: "64M",
            options: &[],
            qemu: Qemu::Backports,
            arguments: &["-no-reboot"],
            script: "",
        }
    }
}

impl Machine {
    /// `hecaton vm run`.
    pub(crate) fn start(
        cluster: &Cluster,
        guests: &Guests,
        spec: &Spec<'_>,
    ) -> anyhow::Result<Self> {
        let mut command = cluster.command("vm");
        command.args(["run", "--name", spec.name, "--memory", spec.memory, "--local", spec.local]);
        command.args(spec.options);
        // The cluster's own node, where a test has started another one.
        command.arg("--dir").arg(cluster.file("node"));
        command.arg("--").args(guests.command_line(spec.qemu, spec.script));
        let monitor = cluster.file(&format!("{}.monitor", spec.name));
        command.args(spec.arguments);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display()));
        Self::spawn(spec.name, command, monitor)
    }

    /// Starts `hecaton vm attach`, and then QEMU as another launcher would start it. The attachment
    /// ends after the machine.
    pub(crate) fn start_attached(
        cluster: &Cluster,
        guests: &Guests,
        spec: &Spec<'_>,
    ) -> anyhow::Result<(Self, Attachment)> {
        let hecatons = cluster.file(&format!("{}.hecaton-monitor", spec.name));
        let attachment = Attachment::start(cluster, spec.name, spec.local, |command| {
            command.arg("--qmp").arg(&hecatons);
        })?;
        let library = attachment.needs["library"].as_str().context("no library is named")?;
        let (mut command, monitor) = Self::stock(cluster, guests, spec);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", hecatons.display()));
        command.env("LD_PRELOAD", library).env("HECATON_GUEST_RAM", attachment.socket()?);
        Ok((Self::spawn(spec.name, command, monitor)?, attachment))
    }

    /// A machine that Hecaton knows nothing of.
    pub(crate) fn start_alone(
        cluster: &Cluster,
        guests: &Guests,
        spec: &Spec<'_>,
    ) -> anyhow::Result<Self> {
        let (command, monitor) = Self::stock(cluster, guests, spec);
        Self::spawn(spec.name, command, monitor)
    }

    /// The same, with memory as the arguments have it: of several nodes, say.
    pub(crate) fn start_with_its_memory(
        cluster: &Cluster,
        guests: &Guests,
        spec: &Spec<'_>,
    ) -> anyhow::Result<Self> {
        let (command, monitor) = Self::bare(cluster, guests, spec);
        Self::spawn(spec.name, command, monitor)
    }

    /// QEMU with shared memory and a monitor of the test's own.
    fn stock(cluster: &Cluster, guests: &Guests, spec: &Spec<'_>) -> (Command, PathBuf) {
        let (mut command, monitor) = Self::bare(cluster, guests, spec);
        command.args(["-m", spec.memory, "-machine", "memory-backend=ram", "-object"]);
        command.arg(format!("memory-backend-memfd,id=ram,size={},share=on", spec.memory));
        (command, monitor)
    }

    /// QEMU with a monitor of the test's own.
    fn bare(cluster: &Cluster, guests: &Guests, spec: &Spec<'_>) -> (Command, PathBuf) {
        let words = guests.command_line(spec.qemu, spec.script);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(spec.arguments);
        let monitor = cluster.file(&format!("{}.monitor", spec.name));
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display()));
        (command, monitor)
    }

    /// A command that starts QEMU with this monitor of the test's own.
    pub(crate) fn spawn(
        name: &str,
        mut command: Command,
        monitor: PathBuf,
    ) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut running = Running::spawn(&mut command)?;
        let output = running.output()?;
        let (sender, lines) = mpsc::channel();
        let mut console = File::create(world::dir().join(format!("{name}.console")))?;
        thread::spawn(move || {
            // The kernel's messages are in the machine's own character set.
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                let _ = console.write_all(&line).and_then(|()| console.write_all(b"\n"));
                if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { name: name.to_owned(), running, lines, said: Vec::new(), monitor })
    }

    /// Waits for a line of the console with `text` in it; looks at `watch` meanwhile.
    pub(crate) fn wait_for_watching(
        &mut self,
        text: &str,
        mut watch: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<String> {
        // The console is waited for within a look.
        let what = format!("it says `{text}`");
        let said = until_every(Duration::ZERO, &what, GUEST_PATIENCE, || {
            let heard = self.listen_for(text)?;
            if heard.is_none() {
                watch()?;
            }
            Ok(heard.ok_or_else(|| format!("its last line is {:?}", self.said.last())))
        });
        self.explained(said)
    }

    /// The next line of the console, if it comes soon and has `text` in it.
    fn listen_for(&mut self, text: &str) -> anyhow::Result<Option<String>> {
        let line = match self.lines.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("its console has ended"),
        };
        self.said.push(line.clone());
        if line.contains(text) {
            return Ok(Some(line));
        }
        let exit = line.split_once("guest: exit ").map(|(_, status)| status);
        let has_failed = exit.is_some_and(|status| !status.starts_with('0'));
        ensure!(!has_failed && !line.contains("Kernel panic"), "it does not say that any more");
        Ok(None)
    }

    /// QEMU's process.
    pub(crate) fn id(&self) -> u32 {
        self.running.id()
    }

    /// Writes a line to the guest's serial port.
    pub(crate) fn say(&mut self, line: &str) -> anyhow::Result<()> {
        let input = self.running.child_mut().stdin.as_mut().context("the machine has no input")?;
        let said = writeln!(input, "{line}").context("it cannot be told anything");
        self.explained(said)
    }

    /// Waits for a line of the console with `text` in it.
    pub(crate) fn wait_for(&mut self, text: &str) -> anyhow::Result<String> {
        self.wait_for_watching(text, || Ok(()))
    }

    /// Waits until the guest's script has succeeded and the machine is off.
    pub(crate) fn succeed(&mut self) -> anyhow::Result<()> {
        self.wait_for("guest: exit 0")?;
        self.end()
    }

    /// Waits for the machine's end. To power off is work of the guest's, too.
    pub(crate) fn end(&mut self) -> anyhow::Result<()> {
        let ended = self.running.wait(GUEST_PATIENCE, || Ok(()));
        let status = self.explained(ended)?;
        if !status.success() {
            return Err(self.failed("it did not end well".to_owned()));
        }
        Ok(())
    }

    /// Waits until the machine has ended in whatever way.
    pub(crate) fn end_of_any_kind(&mut self) -> anyhow::Result<()> {
        self.running.wait(PATIENCE, || Ok(())).map(drop)
    }

    /// A monitor of the test's own.
    pub(crate) fn monitor(&self) -> anyhow::Result<Monitor> {
        until("QEMU's monitor answers", PATIENCE, || {
            Ok(Monitor::connect(&self.monitor, scaled(PATIENCE)))
        })
    }

    /// SIGKILL for QEMU.
    pub(crate) fn kill(&self, cluster: &Cluster) -> anyhow::Result<()> {
        let report = report(cluster, &self.name)?;
        let pid = report["pid"].as_u64().context("the node does not know QEMU's process")?;
        kill_dead(u32::try_from(pid)?);
        Ok(())
    }

    /// Whether a line of the console has had `text` in it.
    pub(crate) fn has_said(&mut self, text: &str) -> bool {
        self.said.extend(self.lines.try_iter());
        self.said.iter().any(|line| line.contains(text))
    }

    /// Passes the result on; extends an error with the machine's state and its last console lines.
    pub(crate) fn explained<T, E: Into<anyhow::Error>>(
        &mut self,
        asked: Result<T, E>,
    ) -> anyhow::Result<T> {
        asked.map_err(|error| self.failed(format!("{:#}", error.into())))
    }

    /// An error that gives the failure and its probable cause in one line, then 15 console lines.
    pub(crate) fn failed(&mut self, what: String) -> anyhow::Error {
        // A kernel that dies has more to say, and a process takes its time to end.
        let until = Instant::now() + Duration::from_secs(2);
        let left = || until.saturating_duration_since(Instant::now());
        while let Ok(line) = self.lines.recv_timeout(left()) {
            self.said.push(line);
        }
        let mut text = format!("{}: {what}", self.name);
        if let Ok(status) = self.running.wait(left(), || Ok(())) {
            let _ = write!(text, ", its process has ended ({status})");
        }
        for telling in TELLING {
            if let Some(line) = self.said.iter().find(|line| line.contains(telling)) {
                let _ = write!(text, ", it says `{line}`");
            }
        }
        for line in &self.said[self.said.len().saturating_sub(15)..] {
            let _ = write!(text, "\n    | {line}");
        }
        anyhow::Error::msg(text)
    }
}

/// A `hecaton vm attach` that waits for its machine's end.
pub(crate) struct Attachment {
    running: Running,
    /// JSON that the command has printed, with `socket` and `library`.
    pub(crate) needs: Value,
}

impl Attachment {
    pub(crate) fn start(
        cluster: &Cluster,
        name: &str,
        local: &str,
        with: impl FnOnce(&mut Command),
    ) -> anyhow::Result<Self> {
        let mut command = cluster.command("vm");
        command.args(["attach", name, "--local", local, "--json", "--dir"]);
        command.arg(cluster.file("node"));
        with(&mut command);
        let mut running = Running::spawn(command.stdout(Stdio::piped()))?;
        let output = running.output()?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        let needs = serde_json::from_str(&line)
            .with_context(|| format!("`hecaton vm attach --json` says {line:?}"))?;
        Ok(Self { running, needs })
    }

    /// Where the machine hands its memory over.
    pub(crate) fn socket(&self) -> anyhow::Result<&str> {
        self.needs["socket"].as_str().context("no socket is named")
    }

    /// Waits for its end.
    pub(crate) fn end(&mut self) -> anyhow::Result<()> {
        let status = self.running.wait(PATIENCE, || Ok(()))?;
        ensure!(status.success(), "`hecaton vm attach` ended with {status}");
        Ok(())
    }
}

/// Output of `hecaton vm status --json` for one machine.
pub(crate) fn report(cluster: &Cluster, name: &str) -> anyhow::Result<Value> {
    let mut command = cluster.command("vm");
    command.args(["status", name, "--json", "--dir"]).arg(cluster.file("node"));
    let ended = crate::harness::process::run(&mut command, PATIENCE)?;
    ended.expect_success("hecaton vm status")?;
    serde_json::from_slice(&ended.stdout).context("the status is no JSON")
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for part in bytes.chunks(3) {
        let word = part.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte));
        let word = word << (8 * (3 - part.len()));
        for digit in 0..4 {
            let index = (word >> (18 - 6 * digit)) & 63;
            text.push(if digit > part.len() { '=' } else { char::from(DIGITS[index as usize]) });
        }
    }
    text
}
