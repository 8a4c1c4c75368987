// Repairs what the theme builds in the browser, after it has done so.
document.addEventListener("DOMContentLoaded", () => {
  // Boxes that scroll sideways can be reached by the Tab key, so that arrow keys scroll them. Only while they
  // scroll: on a wide screen few tables do, and each is a stop on the way through the page.
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.scrollWidth > target.clientWidth) target.setAttribute("tabindex", "0")
      else target.removeAttribute("tabindex")
    }
  })
  const boxes = ".md-typeset__scrollwrap, pre > code, p:has(> img:only-child)"
  for (const box of document.querySelectorAll(`.md-typeset :is(${boxes})`)) observer.observe(box)

  // The copy button of each block of code would be a landmark of its own, without a name.
  for (const nav of document.querySelectorAll(".md-code__nav")) nav.setAttribute("role", "none")

  // Sections with a page of their own are labelled by an arrow, all with the same words.
  for (const nav of document.querySelectorAll(".md-nav__container ~ .md-nav")) {
    nav.removeAttribute("aria-labelledby")
    nav.setAttribute("aria-label", nav.parentElement.querySelector(".md-nav__link").textContent.trim())
  }
})
