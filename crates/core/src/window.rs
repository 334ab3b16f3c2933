//! What was spent of a budget in the last while: a sliding window, cut into slots, that forgets a slot only when all of it is older than the window. So in no
//! span of the window's length is more admitted than the limit; what it costs is that spending is remembered up to one slot too long.
//!
//! A fixed window would let twice the limit through at its edge, and a full token bucket twice the limit in its first window.

/// Slots that make up one window.
const SLOTS: usize = 60;
/// One more than that: the slot being filled and those that may reach into the window.
const KEPT: usize = SLOTS + 1;

/// Money in millionths of the currency that costs are reported in.
pub const MICRO: i64 = 1_000_000;

/// The most that one amount of money counts, in millionths: sums of it stay far from overflow.
pub const MOST: i64 = 1_000_000_000_000_000_000;

/// An amount of money of at least zero, written in decimal digits, in millionths, rounded up.
pub fn micros(amount: &str) -> i64 {
    let (whole, fraction) = amount.split_once('.').unwrap_or((amount, ""));
    let digits = |text: &str| text.bytes().try_fold(0i64, |sum, digit| sum.checked_mul(10)?.checked_add(i64::from(digit.saturating_sub(b'0'))));
    let Some(whole) = digits(whole).and_then(|whole| whole.checked_mul(MICRO)) else { return MOST };
    let (kept, rest) = fraction.split_at_checked(6).unwrap_or((fraction, ""));
    let kept = digits(kept).unwrap_or(0) * 10i64.pow(6u32.saturating_sub(kept.len() as u32));
    let more = i64::from(rest.bytes().any(|digit| digit != b'0'));
    whole.saturating_add(kept + more).min(MOST)
}

/// Something spent, or a limit on it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Attempts begun.
    pub requests: i64,
    /// Tokens, as the budget weighs them.
    pub tokens: i64,
    /// Money, in millionths.
    pub cost: i64,
}

impl Spent {
    /// The sum, saturating.
    pub fn plus(self, other: Spent) -> Spent {
        Spent {
            requests: self.requests.saturating_add(other.requests),
            tokens: self.tokens.saturating_add(other.tokens),
            cost: self.cost.saturating_add(other.cost),
        }
    }

    /// The difference, not below zero.
    pub fn less(self, other: Spent) -> Spent {
        Spent {
            requests: self.requests.saturating_sub(other.requests).max(0),
            tokens: self.tokens.saturating_sub(other.tokens).max(0),
            cost: self.cost.saturating_sub(other.cost).max(0),
        }
    }
}

/// The window of one budget. All zero is an empty one of no length.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Length of a slot in microseconds.
    width: i64,
    /// Number of the slot being filled, counted from the epoch.
    newest: i64,
    slots: [Spent; KEPT],
}

impl Default for Window {
    fn default() -> Self {
        Window { width: 0, newest: 0, slots: [Spent::default(); KEPT] }
    }
}

impl Window {
    /// An empty window of `length` microseconds.
    pub fn new(length: i64) -> Self {
        Window { width: width(length), ..Window::default() }
    }

    /// Moves on to `now`, forgetting slots that have left the window. A window whose length was changed keeps all it remembers, as if spent now: stricter for
    /// a while, never laxer. A clock that was set back changes nothing.
    pub fn advance(&mut self, length: i64, now: i64) {
        if self.width != width(length) {
            let all = self.total();
            *self = Window::new(length);
            self.newest = now.div_euclid(self.width);
            self.slots[index(self.newest)] = all;
            return;
        }
        self.move_on(now);
    }

    /// Moves on to `now` with the length it has.
    fn move_on(&mut self, now: i64) {
        let current = now.div_euclid(self.width);
        let passed = current.saturating_sub(self.newest);
        if passed >= KEPT as i64 {
            self.slots = [Spent::default(); KEPT];
        } else {
            for step in 1..=passed {
                self.slots[index(self.newest + step)] = Spent::default();
            }
        }
        self.newest = self.newest.max(current);
    }

    /// Everything remembered.
    pub fn total(&self) -> Spent {
        self.slots.iter().fold(Spent::default(), |sum, slot| sum.plus(*slot))
    }

    /// Adds to the slot being filled.
    pub fn charge(&mut self, spent: Spent) {
        let slot = &mut self.slots[index(self.newest)];
        *slot = slot.plus(spent);
    }

    /// Adds to the slot of the instant `at`, moving on to it where it is later than all that is remembered. A window of no length remembers nothing.
    pub fn charge_at(&mut self, at: i64, spent: Spent) {
        if self.width == 0 || spent == Spent::default() {
            return;
        }
        self.move_on(at);
        let slot = at.div_euclid(self.width);
        if slot > self.newest - KEPT as i64 {
            let slot = &mut self.slots[index(slot)];
            *slot = slot.plus(spent);
        }
    }

    /// Takes back from the slot of the instant `at`, if it is still remembered and has so much.
    pub fn refund(&mut self, at: i64, spent: Spent) {
        if self.width == 0 {
            return;
        }
        let slot = at.div_euclid(self.width);
        if slot <= self.newest && slot > self.newest - KEPT as i64 {
            let slot = &mut self.slots[index(slot)];
            *slot = slot.less(spent);
        }
    }

    /// Adds what was spent at an instant in the past, if it is still in the window: for rebuilding. Older instants first.
    pub fn remember(&mut self, length: i64, at: i64, spent: Spent) {
        self.advance(length, at);
        self.charge_at(at, spent);
    }

    /// The instant at which the oldest of what is remembered will be forgotten; `None` where nothing is.
    pub fn next(&self) -> Option<i64> {
        (0..KEPT as i64)
            .rev()
            .find(|age| self.slots[index(self.newest - age)] != Spent::default())
            .map(|age| (self.newest - age + KEPT as i64).saturating_mul(self.width))
    }

    /// The instant at which, if nothing more is spent, `fits` will hold for what is remembered then; `None` if it will not even for nothing.
    pub fn when(&self, fits: impl Fn(Spent) -> bool) -> Option<i64> {
        let mut left = self.total();
        for age in (0..KEPT as i64).rev() {
            if fits(left) {
                return Some((self.newest - age).saturating_mul(self.width).saturating_add((KEPT as i64 - 1).saturating_mul(self.width)));
            }
            left = left.less(self.slots[index(self.newest - age)]);
        }
        fits(left).then(|| (self.newest + KEPT as i64).saturating_mul(self.width))
    }
}

fn width(length: i64) -> i64 {
    (length.max(1) as u64).div_ceil(SLOTS as u64) as i64
}

fn index(slot: i64) -> usize {
    slot.rem_euclid(KEPT as i64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one() -> Spent {
        Spent { requests: 1, tokens: 10, cost: 0 }
    }

    #[test]
    fn money_is_counted_in_millionths_and_rounded_up() {
        for (text, expected) in [
            ("0", 0),
            ("1", MICRO),
            ("0.50", 500_000),
            ("0.0000001", 1),
            ("0.1234560000", 123_456),
            ("0.1234560001", 123_457),
            ("12.3", 12_300_000),
            ("999999999999999999999", MOST),
            ("99999999999999.5", MOST),
            ("1000000000000.1", MOST),
            ("999999999999.999999", MOST - 1),
        ] {
            assert_eq!(micros(text), expected, "{text}");
        }
    }

    #[test]
    fn spending_is_forgotten_after_the_window_and_not_before() {
        let mut window = Window::new(60_000);
        window.advance(60_000, 1_000_500);
        window.charge(one());
        window.advance(60_000, 1_060_499);
        assert_eq!(window.total(), one());
        window.advance(60_000, 1_062_000);
        assert_eq!(window.total(), Spent::default());
    }

    #[test]
    fn a_refund_goes_to_the_slot_it_was_charged_in_and_never_below_zero() {
        let mut window = Window::new(60_000);
        window.advance(60_000, 0);
        window.charge(one());
        window.advance(60_000, 30_000);
        window.charge(one());
        window.refund(0, Spent { requests: 5, tokens: 4, cost: 1 });
        assert_eq!(window.total(), Spent { requests: 1, tokens: 16, cost: 0 });
        window.refund(-1_000_000, one());
        window.refund(1_000_000, one());
        assert_eq!(window.total().tokens, 16);
    }

    #[test]
    fn a_changed_length_forgets_nothing() {
        let mut window = Window::new(60_000);
        window.advance(60_000, 5_000);
        window.charge(one());
        window.advance(10_000, 6_000);
        assert_eq!(window.total(), one());
    }

    #[test]
    fn a_clock_set_back_opens_no_room() {
        let mut window = Window::new(60_000);
        window.advance(60_000, 500_000);
        window.charge(one());
        window.advance(60_000, 100_000);
        window.charge(one());
        assert_eq!(window.total(), one().plus(one()));
    }

    proptest! {
        #[test]
        fn no_span_of_the_window_s_length_admits_more_than_the_limit(
            length in 60i64..100_000, limit in 1i64..20, gaps in prop::collection::vec(0i64..5_000, 1..200),
        ) {
            let mut window = Window::new(length);
            let mut now = 1_000_000;
            let mut admitted: Vec<i64> = Vec::new();
            for gap in gaps {
                now += gap;
                window.advance(length, now);
                if window.total().requests < limit {
                    window.charge(one());
                    admitted.push(now);
                }
            }
            for (at, first) in admitted.iter().enumerate() {
                let within = admitted[at..].iter().filter(|later| **later - first < length).count();
                prop_assert!(within as i64 <= limit, "{within} within {length} of {first}");
            }
        }

        #[test]
        fn room_comes_when_it_was_promised(
            length in 600i64..100_000, limit in 1i64..10, gaps in prop::collection::vec(0i64..3_000, 1..100),
        ) {
            let mut window = Window::new(length);
            let mut now = 1_000_000;
            for gap in gaps {
                now += gap;
                window.advance(length, now);
                window.charge(one());
            }
            let fits = |spent: Spent| spent.requests < limit;
            let when = window.when(fits);
            prop_assert!(when.is_some());
            let when = when.unwrap_or_default();
            let mut later = window;
            later.advance(length, when.max(now));
            prop_assert!(fits(later.total()), "no room at {when}");
            if when > now {
                let mut earlier = window;
                earlier.advance(length, when - 1);
                prop_assert!(!fits(earlier.total()), "room before {when}");
            }
        }
    }
}
