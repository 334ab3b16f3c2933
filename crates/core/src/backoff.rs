//! How long a failed task waits before its next attempt: exponential, capped, with jitter.

/// A queue's back-off settings; durations in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    /// The wait after the first failure.
    pub base: i64,
    /// What each further failure multiplies it by; at least 1.
    pub factor: f64,
    /// The longest wait, before jitter.
    pub max: i64,
    /// The share of the wait that jitter may add or take away, from 0 to 1.
    pub jitter: f64,
}

impl Backoff {
    /// The wait after the `failures`-th failure (from 1), with `draw` from 0 to 1 deciding the jitter.
    pub fn wait(&self, failures: i32, draw: f64) -> i64 {
        let exponent = f64::from(failures.max(1) - 1);
        let wait = (self.base as f64 * self.factor.powf(exponent)).min(self.max as f64);
        (wait * (1.0 + self.jitter * (2.0 * draw - 1.0))).max(0.0) as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PLAIN: Backoff = Backoff { base: 10, factor: 2.0, max: 1000, jitter: 0.0 };

    #[test]
    fn waits_double_up_to_the_maximum() {
        let waits: Vec<i64> = (1..=9).map(|n| PLAIN.wait(n, 0.5)).collect();
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
    }

    proptest! {
        #[test]
        fn jitter_stays_within_its_share_and_nothing_overflows(
            base in 0i64..i64::MAX, factor in 1.0f64..1e6, max in 0i64..i64::MAX, jitter in 0.0f64..=1.0, failures in 1i32..i32::MAX, draw in 0.0f64..1.0,
        ) {
            let without = Backoff { base, factor, max, jitter: 0.0 }.wait(failures, draw);
            let with = Backoff { base, factor, max, jitter }.wait(failures, draw);
            prop_assert!(without >= 0 && without <= max.max(0).saturating_add(1024));
            prop_assert!(with >= 0);
            prop_assert!((with as f64 - without as f64).abs() <= without as f64 * jitter + 2048.0);
        }
    }
}
