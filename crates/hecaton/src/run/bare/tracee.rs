//! Holds a program stopped at its first instruction, and has it make system calls.
//!
//! The only module of this command that uses `ptrace`. The thread that starts a program is its
//! tracer, so one thread makes all calls of this module.

use anyhow::{Context as _, bail, ensure};
use libc::{c_int, c_long, user_fpregs_struct, user_regs_struct};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// `syscall; int3`
const SYSTEM_CALL: [u8; 3] = [0x0f, 0x05, 0xcc];

/// Offset of the trap in [`SYSTEM_CALL`], to which a called function returns.
const TRAP_AT: u64 = 2;

/// Bytes below the stack pointer that the ABI lets a function use.
const RED_ZONE: u64 = 128;

const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;

/// Makes `command` stop before its first instruction, with all signals blocked but SIGTRAP: nobody
/// waits for the process before it has executed the program.
pub(super) fn stop_at_start(command: &mut Command) {
    let start = || {
        let mut signals = MaybeUninit::uninit();
        // SAFETY: async-signal-safe functions, on a set that the first one initialises.
        unsafe {
            libc::sigfillset(signals.as_mut_ptr());
            libc::sigdelset(signals.as_mut_ptr(), libc::SIGTRAP);
            let (set, old) = (signals.as_ptr(), std::ptr::null_mut());
            match libc::pthread_sigmask(libc::SIG_SETMASK, set, old) {
                0 => {}
                error => return Err(io::Error::from_raw_os_error(error)),
            }
            match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        }
    };
    // SAFETY: the closure makes system calls only.
    unsafe { command.pre_exec(start) };
}

/// A stopped program.
pub(super) struct Tracee {
    pid: libc::pid_t,
    memory: File,
    registers: user_regs_struct,
    vectors: user_fpregs_struct,
    /// The program's bytes that [`SYSTEM_CALL`] overwrites.
    replaced: [u8; SYSTEM_CALL.len()],
    /// Signals that arrived meanwhile, to be sent again.
    held: Vec<c_int>,
}

impl Tracee {
    /// Waits until the program has stopped at its first instruction.
    pub(super) fn at_start(pid: u32) -> anyhow::Result<Tracee> {
        let pid = pid as libc::pid_t;
        let mut held = Vec::new();
        wait_for_trap(pid, &mut held)?;
        // So that it does not run on, half prepared, if this command is killed.
        request(libc::PTRACE_SETOPTIONS, pid, 0, libc::PTRACE_O_EXITKILL as usize)?;
        let path = format!("/proc/{pid}/mem");
        let memory = File::options().read(true).write(true).open(&path);
        let memory = memory.with_context(|| format!("cannot open {path}"))?;
        let registers = get(libc::PTRACE_GETREGS, pid)?;
        let vectors = get(libc::PTRACE_GETFPREGS, pid)?;
        let mut tracee = Tracee { pid, memory, registers, vectors, replaced: [0; 3], held };
        let mut replaced = [0; SYSTEM_CALL.len()];
        tracee.read(tracee.registers.rip, &mut replaced)?;
        tracee.write(tracee.registers.rip, &SYSTEM_CALL)?;
        tracee.replaced = replaced;
        Ok(tracee)
    }

    /// Writes to the program's memory, also to read-only pages.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> anyhow::Result<()> {
        self.memory.write_all_at(bytes, at).context("cannot write to its memory")
    }

    pub(super) fn read(&self, at: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        self.memory.read_exact_at(bytes, at).context("cannot read its memory")
    }

    /// Makes the program make a system call.
    pub(super) fn call(&mut self, number: c_long, arguments: [u64; 6]) -> io::Result<u64> {
        let mut registers = self.registers;
        registers.rax = number as u64;
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        (registers.rdi, registers.rsi, registers.rdx) = (rdi, rsi, rdx);
        (registers.r10, registers.r8, registers.r9) = (r10, r8, r9);
        let result = self.run(registers).map_err(io::Error::other)?;
        match result as i64 {
            error @ -4095..=-1 => Err(io::Error::from_raw_os_error(-error as i32)),
            _ => Ok(result),
        }
    }

    /// Makes the program call a C function on its own stack, with a pointer to a copy of
    /// `argument`. Returns the copy after the call, and the function's result.
    pub(super) fn call_function<const N: usize>(
        &mut self,
        function: u64,
        argument: &[u8; N],
    ) -> anyhow::Result<([u8; N], i32)> {
        let at = (self.registers.rsp - RED_ZONE - N as u64) & !63;
        let top = at - 64;
        self.write(at, argument)?;
        let mut registers = self.registers;
        // As behind a `call`: the address to return to lies below 16 aligned bytes.
        registers.rsp = top - 8;
        self.write(registers.rsp, &(self.registers.rip + TRAP_AT).to_le_bytes())?;
        registers.rip = function;
        registers.rdi = at;
        let result = self.run(registers)?;
        let mut changed = [0; N];
        self.read(at, &mut changed)?;
        Ok((changed, result as i32))
    }

    /// Runs the program to the trap. Returns rax.
    fn run(&mut self, mut registers: user_regs_struct) -> anyhow::Result<u64> {
        // No system call was interrupted, so that none is begun anew.
        registers.orig_rax = u64::MAX;
        set(libc::PTRACE_SETREGS, self.pid, &registers)?;
        request(libc::PTRACE_CONT, self.pid, 0, 0)?;
        wait_for_trap(self.pid, &mut self.held)?;
        let after: user_regs_struct = get(libc::PTRACE_GETREGS, self.pid)?;
        ensure!(
            after.rip == self.registers.rip + SYSTEM_CALL.len() as u64,
            "it has stopped at an unexpected place: {:#x}",
            after.rip
        );
        Ok(after.rax)
    }

    /// Restores the program's state, sets its signal mask to `blocked`, and detaches.
    pub(super) fn let_go(self, blocked: &libc::sigset_t) -> anyhow::Result<()> {
        self.write(self.registers.rip, &self.replaced)?;
        let mut registers = self.registers;
        registers.orig_rax = u64::MAX;
        set(libc::PTRACE_SETREGS, self.pid, &registers)?;
        set(libc::PTRACE_SETFPREGS, self.pid, &self.vectors)?;
        let mask = std::ptr::from_ref(blocked).cast::<u64>();
        // SAFETY: the kernel's set is the first word of libc's.
        let mask = unsafe { *mask };
        // SAFETY: the kernel reads one word.
        let set =
            unsafe { libc::ptrace(PTRACE_SETSIGMASK, self.pid, size_of::<u64>(), &raw const mask) };
        ensure!(set == 0, "cannot set its signals: {}", io::Error::last_os_error());
        for signal in self.held {
            // SAFETY: numbers only; the process is this one's child, and not reaped.
            unsafe { libc::kill(self.pid, signal) };
        }
        Ok(request(libc::PTRACE_DETACH, self.pid, 0, 0)?)
    }
}

/// Waits for SIGTRAP. Puts other signals aside; a fault is an error.
fn wait_for_trap(pid: libc::pid_t, held: &mut Vec<c_int>) -> anyhow::Result<()> {
    loop {
        match wait_for_stop(pid)? {
            libc::SIGTRAP => return Ok(()),
            signal @ (libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE) => {
                bail!("it has come to a fault (signal {signal})")
            }
            signal => held.push(signal),
        }
        request(libc::PTRACE_CONT, pid, 0, 0)?;
    }
}

/// Waits until the program stops, and returns the signal that stopped it. Fails if the program
/// ends; the caller then reaps it.
fn wait_for_stop(pid: libc::pid_t) -> anyhow::Result<c_int> {
    loop {
        let change = wait(pid, libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT)?;
        let has_stopped = matches!(change.si_code, libc::CLD_TRAPPED | libc::CLD_STOPPED);
        ensure!(has_stopped, "it has ended before it began");
        let stop = wait(pid, libc::WSTOPPED | libc::WNOHANG)?;
        // SAFETY: `waitid` has filled in the structure, with zeros if SIGKILL came meanwhile.
        let (stopped, signal) = unsafe { (stop.si_pid(), stop.si_status()) };
        if stopped == pid {
            return Ok(signal);
        }
    }
}

/// Waits for a change of the program's state.
fn wait(pid: libc::pid_t, options: c_int) -> anyhow::Result<libc::siginfo_t> {
    loop {
        // SAFETY: an all-zero siginfo_t is valid, and the kernel writes one.
        let (waited, info) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let id = pid.cast_unsigned();
            (libc::waitid(libc::P_PID, id, &raw mut info, options | libc::__WALL), info)
        };
        if waited == 0 {
            return Ok(info);
        }
        let error = io::Error::last_os_error();
        ensure!(error.kind() == io::ErrorKind::Interrupted, "cannot wait for it: {error}");
    }
}

fn request(what: libc::c_uint, pid: libc::pid_t, at: usize, data: usize) -> io::Result<()> {
    // SAFETY: the requests of this module that are made by this function take numbers.
    match unsafe { libc::ptrace(what, pid, at, data) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reads registers. `T` must be the kernel's structure for `what`.
fn get<T: Copy>(what: libc::c_uint, pid: libc::pid_t) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the kernel fills in the structure, of integers, for which zeros are valid, too.
    unsafe {
        match libc::ptrace(what, pid, 0, value.as_mut_ptr()) {
            0 => Ok(value.assume_init()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Writes registers. `T` must be the kernel's structure for `what`.
fn set<T: Copy>(what: libc::c_uint, pid: libc::pid_t, value: &T) -> io::Result<()> {
    // SAFETY: the kernel reads the structure.
    match unsafe { libc::ptrace(what, pid, 0, std::ptr::from_ref(value)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
