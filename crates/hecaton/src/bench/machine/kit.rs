//! Finds the parts of guests, and builds QEMU's command lines.
//! The parts are a kernel, an archive of programs and QEMU, as `scripts/guest.sh` builds them.

use super::overlay;
use crate::bench::world::process::{require, tool};
use anyhow::{Context as _, ensure};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// Processors of each guest.
pub(in crate::bench) const PROCESSORS: u32 = 2;

/// Where it is.
#[derive(clap::Args)]
pub(in crate::bench) struct KitArgs {
    /// Where the guest is that `scripts/guest.sh qemu` builds [default: `guest` beside the
    /// directory of this executable]
    #[arg(long, value_name = "DIR")]
    guest: Option<PathBuf>,
}

/// The parts of a guest, found and ready.
pub(in crate::bench) struct Kit {
    kernel: PathBuf,
    initramfs: PathBuf,
    qemu: PathBuf,
    /// Arguments that this QEMU needs.
    own: Vec<OsString>,
    /// The first line of QEMU's `--version`.
    pub(in crate::bench) version: String,
}

impl Kit {
    /// Looks where the arguments say, else where `scripts/guest.sh` puts the guest beside a build.
    /// Writes the archive for the guests to `scratch`.
    pub(in crate::bench) fn find(args: &KitArgs, scratch: &Path) -> anyhow::Result<Self> {
        ensure!(cfg!(target_arch = "x86_64"), "the guest is one for x86-64, and this host is not");
        let dir = match &args.guest {
            Some(dir) => dir.clone(),
            None => beside_the_build()?,
        };
        let dir = std::path::absolute(dir)?;
        let kernel = dir.join("vmlinuz");
        for part in [&kernel, &dir.join("initramfs")] {
            ensure!(
                part.is_file(),
                "there is no guest in {}: {} is missing. Build one with `scripts/guest.sh qemu` of \
                 Hecaton's sources (it prints its directory) and name that with --guest",
                dir.display(),
                part.display()
            );
        }
        let initramfs = scratch.join("initramfs");
        overlay::write(&dir.join("initramfs"), &initramfs)?;
        let unpacked = dir.join("qemu-10/usr");
        let (qemu, own) = if unpacked.is_dir() {
            let firmware = ["share/qemu", "share/seabios"].map(|place| unpacked.join(place));
            let own = firmware.into_iter().flat_map(|place| ["-L".into(), place.into()]).collect();
            (unpacked.join("bin/qemu-system-x86_64"), own)
        } else {
            require("qemu-system-x86_64", "qemu-system-x86")?;
            // QEMU 7.2 emulates CMPXCHG16B wrongly, and kernels that use it crash now and then.
            ("qemu-system-x86_64".into(), vec!["-cpu".into(), "qemu64,-cx16".into()])
        };
        let version = tool(qemu.to_str().context("QEMU's path is no text")?, &["--version"])?;
        let version = version.lines().next().unwrap_or_default().to_owned();
        Ok(Self { kernel, initramfs, qemu, own, version })
    }

    /// QEMU and its arguments for a machine that exists but never runs, without those for memory.
    pub(in crate::bench) fn paused(&self) -> Vec<OsString> {
        let mut words = vec![self.qemu.clone().into_os_string()];
        words.extend(self.own.iter().cloned());
        let fixed = "-accel tcg -M q35 -nodefaults -display none -S";
        words.extend(fixed.split(' ').map(OsString::from));
        words
    }

    /// QEMU and its arguments for a guest whose kernel logs to the file `console`. Standard input
    /// and output are the bench's. The kernel also gets the arguments `kernel`. Without `memory`,
    /// other arguments set how much memory the guest has.
    pub(in crate::bench) fn command_line(
        &self,
        memory: Option<u64>,
        console: &Path,
        kernel: &str,
    ) -> Vec<OsString> {
        let script = format!(
            "stty -F /dev/ttyS1 raw -echo\nexec {} bench program guest ",
            overlay::program()
        );
        let script = script + "</dev/ttyS1 >/dev/ttyS1\n";
        let mut words = vec![self.qemu.clone().into_os_string()];
        words.extend(self.own.iter().cloned());
        let mut console_file = OsString::from("file:");
        console_file.push(console);
        let fixed = "-accel tcg -M q35 -nodefaults -no-reboot -display none";
        words.extend(fixed.split(' ').map(OsString::from));
        words.extend(["-smp".into(), PROCESSORS.to_string().into()]);
        if let Some(bytes) = memory {
            words.extend(["-m".into(), format!("{}M", bytes >> 20).into()]);
        }
        words.extend(["-serial".into(), console_file, "-serial".into(), "stdio".into()]);
        words.extend(["-kernel".into(), self.kernel.clone().into()]);
        words.extend(["-initrd".into(), self.initramfs.clone().into()]);
        // The kernel's timer check sometimes fails on an emulated processor of a busy host.
        let script = base64(script.as_bytes());
        let line =
            format!("console=ttyS0 quiet no_timer_check panic=-1 {kernel} hecaton.script={script}");
        words.extend(["-append".into(), line.into()]);
        words
    }
}

/// `target/guest` of the build directory of this executable.
fn beside_the_build() -> anyhow::Result<PathBuf> {
    let program = crate::bench::world::cluster::this_program()?;
    let target = program.ancestors().nth(2).context("this executable is in no directory")?;
    Ok(target.join("guest"))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for part in bytes.chunks(3) {
        let word = part.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte));
        let word = word << (8 * (3 - part.len()));
        for digit in 0..4 {
            let index = (word >> (18 - 6 * digit)) & 63;
            text.push(if digit > part.len() { '=' } else { char::from(DIGITS[index as usize]) });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_the_way_out() {
        let empty = tempfile::tempdir().unwrap();
        let error = Kit::find(&KitArgs { guest: Some(empty.path().to_owned()) }, empty.path())
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("vmlinuz is missing"), "{error}");
        assert!(error.contains("scripts/guest.sh qemu") && error.contains("--guest"), "{error}");
    }

    #[test]
    fn base64_is_that_of_others() {
        for (plain, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
    }
}
