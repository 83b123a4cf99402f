//! The system's own QEMU, with `libhecaton.so` preloaded, and a guest that is one sweep over
//! memory.

use crate::world::{LOCAL, World};
use hecaton_testkit::{patience, wait_for_every, wait_until};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// A multiboot kernel: three times, it writes to the first and the last word of each page from 2
/// MiB to the end of memory, other values each time, and then compares them. It puts `P` on port
/// 0xe9 after each pass, `D` after the last, `F` if a word is not what it was, and leaves through
/// isa-debug-exit.
const KERNEL: &[u8] = &[
    // Magic, flags (address fields are valid), checksum; header, load, load end, bss end, entry.
    0x02, 0xb0, 0xad, 0x1b, 0x03, 0x00, 0x01, 0x00, 0xfb, 0x4f, 0x51, 0xe4, //
    0x00, 0x00, 0x10, 0x00, 0x00, 0x00, 0x10, 0x00, 0x00, 0x00, 0x00, 0x00, //
    0x00, 0x00, 0x00, 0x00, 0x20, 0x00, 0x10, 0x00, //
    // esi: the end of memory, from the multiboot information at ebx. ebp: the pass.
    0x8b, 0x73, 0x08, 0xc1, 0xe6, 0x0a, 0x81, 0xc6, 0x00, 0x00, 0x10, 0x00, //
    0x81, 0xe6, 0x00, 0xf0, 0xff, 0xff, 0x31, 0xed, //
    // pass: ecx = ++ebp * 0x9e3779b1.
    0x45, 0x69, 0xcd, 0xb1, 0x79, 0x37, 0x9e, //
    // For edi in 2 MiB..esi: [edi] = [edi + 0xffc] = edi ^ ecx.
    0xbf, 0x00, 0x00, 0x20, 0x00, 0x89, 0xf8, 0x31, 0xc8, 0x89, 0x07, //
    0x89, 0x87, 0xfc, 0x0f, 0x00, 0x00, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, //
    0x39, 0xf7, 0x72, 0xea, //
    // The same, compared.
    0xbf, 0x00, 0x00, 0x20, 0x00, 0x89, 0xf8, 0x31, 0xc8, 0x39, 0x07, 0x75, 0x23, //
    0x39, 0x87, 0xfc, 0x0f, 0x00, 0x00, 0x75, 0x1b, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, //
    0x39, 0xf7, 0x72, 0xe6, //
    // `P`; the next pass; `D`, and out.
    0xb0, 0x50, 0xe6, 0xe9, 0x83, 0xfd, 0x03, 0x72, 0xb6, 0xb0, 0x44, 0xe6, 0xe9, //
    0x31, 0xc0, 0xe6, 0xf4, //
    // bad: `F`, and out.
    0xb0, 0x46, 0xe6, 0xe9, 0xb0, 0x01, 0xe6, 0xf4, 0xf4, 0xeb, 0xfd,
];

/// isa-debug-exit makes an odd status of the number that the guest gives it.
const GUEST_IS_CONTENT: i32 = 1;

const MEMORY: u64 = 128 << 20;

struct Qemu {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    console: PathBuf,
}

/// Where the library is built; `None` says that it is not, or QEMU is not there.
fn library() -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    let library = test.parent()?.parent()?.join("libhecaton.so");
    let qemu = Command::new("qemu-system-x86_64").arg("--version").output();
    let missing = match (library.is_file(), qemu) {
        (true, Ok(_)) => return Some(library),
        (false, _) => "libhecaton.so is not built (cargo build -p hecaton-preload)",
        (_, Err(_)) => "there is no qemu-system-x86_64",
    };
    println!("skipped: qemu: {missing}");
    None
}

impl Qemu {
    fn start(world: &World, library: &PathBuf) -> Qemu {
        let kernel = world.file("kernel");
        std::fs::write(&kernel, KERNEL).unwrap();
        let console = world.file("console");
        let mut child = Command::new("qemu-system-x86_64")
            .env("LD_PRELOAD", library)
            .env("HECATON_GUEST_RAM", &world.socket)
            .args(["-accel", "tcg", "-nodefaults", "-display", "none", "-qmp", "stdio"])
            .args(["-machine", "q35,memory-backend=ram", "-device", "isa-debug-exit,iobase=0xf4"])
            .arg("-object")
            .arg(format!("memory-backend-memfd,id=ram,share=on,size={MEMORY}"))
            .args(["-m", &format!("{}M,slots=4,maxmem=1G", MEMORY >> 20)])
            .arg("-debugcon")
            .arg(format!("file:{}", console.display()))
            .arg("-kernel")
            .arg(&kernel)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(world.file("stderr")).unwrap())
            .spawn()
            .unwrap();
        let orders = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut qemu = Qemu { child, orders, answers, console };
        qemu.qmp("{\"execute\":\"qmp_capabilities\"}").unwrap();
        qemu
    }

    /// The answer to a QMP command, or its error; what is said unasked is passed over.
    fn qmp(&mut self, command: &str) -> Result<Value, String> {
        writeln!(self.orders, "{command}").unwrap();
        loop {
            let mut line = String::new();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "QEMU has ended");
            let mut answer: Value = serde_json::from_str(&line).unwrap();
            if let Some(error) = answer.get("error") {
                return Err(error["desc"].to_string());
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }

    fn passes(&self) -> usize {
        std::fs::read(&self.console).unwrap().iter().filter(|&&byte| byte == b'P').count()
    }

    fn wait_until_done(mut self) -> String {
        let status = self.child.wait().unwrap();
        let console = std::fs::read_to_string(&self.console).unwrap();
        assert_eq!(status.code(), Some(GUEST_IS_CONTENT), "the guest, or QEMU: {console}");
        console
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn boots_and_survives_dead_pagers_and_reboots() {
    let Some(library) = library() else { return };
    let world = World::start();
    let mut qemu = Qemu::start(&world, &library);
    // In the middle of it, however fast that is: each pager has evicted something.
    for _ in 0..3 {
        wait_until("pages are evicted", || world.stats().pages_evicted > 0);
        world.kill_pager();
    }
    wait_until("the guest has swept its memory once", || qemu.passes() > 0);
    qemu.qmp("{\"execute\":\"system_reset\"}").unwrap();
    let stats = world.stats();
    assert_eq!(stats.guest_ram_bytes, MEMORY);
    assert!(stats.memory_file_bytes <= LOCAL, "{stats:?}");
    let console = qemu.wait_until_done();
    assert!(console.ends_with("PPPD") && !console.contains('F'), "{console}");
    wait_until("its end is noticed", || world.stats().processes == 0);
    world.end();
}

pub(crate) fn memory_is_plugged_or_refused_by_qmp() {
    let Some(library) = library() else { return };
    let world = World::start();
    let mut qemu = Qemu::start(&world, &library);
    qemu.qmp("{\"execute\":\"stop\"}").unwrap();
    let backend = |id: &str, more: &str| {
        format!(
            "{{\"execute\":\"object-add\",\"arguments\":{{\"qom-type\":\"memory-backend-memfd\",\
             \"id\":\"{id}\",\"share\":true,\"size\":{MEMORY}{more}}}}}"
        )
    };
    qemu.qmp(&backend("more", "")).unwrap();
    assert_eq!(world.stats().guest_ram_bytes, 2 * MEMORY);
    // Filled by QEMU itself, and far more than may be local.
    qemu.qmp(&backend("full", ",\"prealloc\":true")).unwrap();
    let stats = world.stats();
    assert!(stats.pages_evicted > 0 && stats.memory_file_bytes <= LOCAL, "{stats:?}");
    for id in ["more", "full"] {
        let command = "{\"execute\":\"object-del\",\"arguments\":{\"id\":\"";
        qemu.qmp(&format!("{command}{id}\"}}}}")).unwrap();
    }
    // QEMU unmaps when no thread can be using it any more.
    wait_until("it is unmapped", || world.stats().guest_ram_bytes == MEMORY);
    let refusal = qemu.qmp(&backend("huge", ",\"hugetlb\":true"));
    assert!(refusal.is_err(), "{refusal:?}");
    // A machine of its own on the same pager is refused, with the reason; this one goes on.
    let second = Command::new("qemu-system-x86_64")
        .env("LD_PRELOAD", &library)
        .env("HECATON_GUEST_RAM", &world.socket)
        .args(["-accel", "tcg", "-nodefaults", "-display", "none", "-S", "-m", "64M"])
        .args(["-machine", "q35,memory-backend=ram"])
        .args(["-object", "memory-backend-memfd,id=ram,share=on,size=64M"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success(), "{said}");
    assert!(said.contains("not paged: this pager serves a machine already"), "{said}");
    qemu.qmp("{\"execute\":\"cont\"}").unwrap();
    // It sweeps three times and ends: a pass takes some 100 ms.
    let swept = wait_for_every(Duration::from_millis(1), "a sweep", patience(), || {
        if qemu.passes() > 0 { Ok(()) } else { Err("no pass is over") }
    });
    swept.unwrap();
    qemu.qmp("{\"execute\":\"stop\"}").unwrap();
    // It leaves the pool, and what is plugged after that is its own affair.
    world.control("\"detach\"");
    wait_until("it is detached", || world.stats().processes == 0);
    qemu.qmp(&backend("own", "")).unwrap();
    qemu.qmp("{\"execute\":\"cont\"}").unwrap();
    let console = qemu.wait_until_done();
    assert_eq!(console, "PPPD");
    world.end();
}
